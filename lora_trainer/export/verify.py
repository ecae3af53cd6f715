"""Who proves an image model's file: the loader of the user's own pipeline, onto the very model that was trained (proof.py).

Where diffusers has no loader for the pipeline, or its loader does not take the layout or the kind, there is nobody to ask: our own
reading is put beside the base's layers in place of the trainer's, each change of a weight as a whole and one at a time, and that
is said. One reading is known to differ: diffusers drops DoRA's magnitudes from kohya files; then the difference is not refused but
told. Left out: other programs (A1111, ComfyUI), which cannot be called from here; the key lists in tests/golden stand for them.
"""

import inspect
from functools import partial
from pathlib import Path
from typing import Any, cast

import diffusers as diffusers_library
import torch
from torch import Tensor, nn

from ..adapters import Adapter
from ..adapters.layers import applied
from ..engine.tracker import host_memory
from ..errors import t
from ..files.headers import read_header
from ..layouts.lora import LoraModule
from ..layouts.read import is_kohya
from ..layouts.readers import loader_for, pipeline_for, proves
from ..seam.family import Family
from .proof import Forward, Load, Loaded, Verification, check_consumer, prove


def verify(model: nn.ModuleDict, adapter: Adapter, family: Family, path: Path, forward: Forward) -> Verification:
    """Model, adapter and random state come out as they went in, also after an error."""
    layout = "kohya" if is_kohya(read_header(path, path.name)[0]) else "diffusers"
    loader = loader_for(family)
    if loader is None:
        load: Load = partial(_by_ourselves, _no_loader(pipeline_for(family).__name__))
    elif not proves(family, layout, adapter.kind):
        load = partial(_by_ourselves, _not_read(adapter.kind))
    else:
        load = partial(_by_pipeline, loader, path)
    return prove(model, adapter, path, load, forward)


def _no_loader(pipeline: str) -> str:
    return t(
        pt=f"nosso leitor, pois o diffusers não tem carregador de LoRA para {pipeline}",
        en=f"our own reader, since diffusers has no LoRA loader for {pipeline}",
    )


def _not_read(kind: str) -> str:
    if kind != "lora":
        return t(
            pt="releitura própria (o diffusers não lê este arquivo)", en="our own reader (diffusers does not read this file)"
        )
    return t(
        pt="nosso leitor, pois o diffusers não lê este arquivo (para ele, acrescente diffusers a saida.formatos)",
        en="our own reader, since diffusers does not read this file (for it, add diffusers to output.formats)",
    )


def _by_pipeline(loader: Any, path: Path, modules: Any, model: nn.ModuleDict) -> Loaded:
    """`loader`: diffusers', of the user's pipeline."""
    load = _into_transformer if "transformer" in model else _into_unet
    drops_dora = load(loader, path, modules, model)
    lora = all(isinstance(module, LoraModule) for module in modules.values())
    dtype = check_consumer(model, modules, path) if lora else torch.float32
    return Loaded(f"diffusers {diffusers_library.__version__}", dtype, drops_dora)


def _into_unet(loader: Any, path: Path, modules: Any, model: nn.ModuleDict) -> bool:
    """And into text encoders; whether DoRA's magnitudes were left out."""
    config = getattr(model["unet"], "config", None)
    state, alphas, metadata = loader.lora_state_dict(
        str(path), unet_config=config, local_files_only=True, return_lora_metadata=True
    )
    for part in sorted({name.partition(".")[0] for name in modules}):
        if part.startswith("text_encoder"):
            loader.load_lora_into_text_encoder(state, alphas, model[part], prefix=part, metadata=metadata)
        else:
            loader.load_lora_into_unet(state, alphas, model[part], metadata=metadata)
    has_dora = any("magnitude" in module.factors for module in modules.values())
    return has_dora and not any("magnitude" in key for key in state)


def _into_transformer(loader: Any, path: Path, modules: Any, model: nn.ModuleDict) -> bool:
    """A kohya file comes with parts that are all zero. Some loaders keep alphas apart (FLUX's); others fold them in."""
    apart = "network_alphas" in inspect.signature(loader.load_lora_into_transformer).parameters
    wanted = {"return_lora_metadata": True, **({"return_alphas": True} if apart else {})}
    state, *alphas, metadata = loader.lora_state_dict(str(path), local_files_only=True, **wanted)
    zero = {key.partition(".lora_B")[0] for key, value in state.items() if ".lora_B" in key and not bool(value.any())}
    gone = zero - modules.keys()
    state = {key: value for key, value in state.items() if key.partition(".lora_")[0] not in gone}
    options = {"network_alphas": alphas[0]} if apart else {}
    loader.load_lora_into_transformer(state, transformer=model["transformer"], metadata=metadata, **options)
    return False


def _by_ourselves(words: str, modules: Any, model: nn.ModuleDict) -> Loaded:
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Changed(model.get_submodule(name), module))
    return Loaded(words)


class Changed(nn.Module):
    """A layer with a change of its weight beside it."""

    def __init__(self, base_layer: nn.Module, module: Any) -> None:
        super().__init__()
        self.base_layer, self.module = base_layer, module

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.base_layer.weight)

    @property
    def bias(self) -> Tensor | None:
        return cast("Tensor | None", self.base_layer.bias)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.base_layer(input, *args, **kwargs)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        with host_memory():
            delta: Tensor = self.module.change(self.weight)
        return (output + applied(self.base_layer, input.to(dtype), delta.to(input.device, dtype))).to(output.dtype)
