"""Proof that a LoHa or LoKr file works: its change of every weight, made from the file, gives the trainer's output.

diffusers reads the LoKr of a few families, and then its loader is asked, as for a LoRA. For the rest there is nobody to ask:
the file is read back, each layer's ΔW is computed from it as a whole, on the CPU and one at a time, and put beside the base
in place of the trainer's layers, which compute without ever holding it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import diffusers as diffusers_library
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.tracker import host_memory
from ..errors import t
from ..files.headers import read_header
from ..layouts.lycoris import Lycoris, LycorisModule, misfits
from ..layouts.read import is_kohya
from ..layouts.readers import reader_for
from .proof import (
    FILE_TOLERANCE,
    OUTPUT_TOLERANCE,
    Verification,
    lifted_out,
    no_effect_notice,
    quiet_probe,
    relative,
    relative_norm,
    require,
    rounded,
    stored_dtype,
)

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..seam.family import Family

LOKR_READERS = ("Flux2LoraLoaderMixin", "ZImageLoraLoaderMixin")
"""diffusers' pipeline loaders that take a LoKr (0.42)."""


class Changed(nn.Module):
    """A layer with a change of its weight beside it."""

    def __init__(self, base_layer: nn.Module, module: LycorisModule) -> None:
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
        layer, kind = self.base_layer, input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        with host_memory():
            delta = self.module.delta().view(self.weight.shape)
        delta, input = delta.to(input.device, dtype), input.to(dtype)
        if isinstance(layer, nn.Conv2d):
            how: Any = (layer.stride, layer.padding, layer.dilation)
            return (output + F.conv2d(input, delta, None, *how)).to(output.dtype)
        return (output + F.linear(input, delta)).to(output.dtype)


def verify_lycoris(
    model: nn.ModuleDict, adapter: "Adapter", family: "Family", path: Path, forward: Callable[[nn.ModuleDict], Tensor]
) -> Verification:
    """As verify.verify, which hands over to it."""
    with host_memory():
        live, dtype = adapter.export_lycoris(), stored_dtype(path)
        file = adapter.read_lycoris(path)
        lines = misfits(file, live)
        require(not lines, path, "; ".join(lines))
        difference = max(relative_norm(file.lora[name].delta(), live[name].delta()) for name in live)
    require(difference <= FILE_TOLERANCE[dtype], path, f"delta W: {difference:.2e}")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet_probe(model, adapter):
        with adapter.disabled():
            base = forward(model).float()
        with lifted_out(model, adapter):
            reader = _apply(model, family, path, file.lora)
            raw = forward(model)
        with rounded(adapter, file.lora, torch.float32):
            reference = forward(model).float()
    output, effect = relative(raw.float(), reference), relative(raw.float(), base)
    require(output <= OUTPUT_TOLERANCE[raw.dtype], path, f"output: {output:.2e}")
    require(effect > 0 or torch.equal(reference, base), path, "no effect")
    notice = "" if effect else no_effect_notice()
    return Verification(path, len(live), difference, output, effect, reader, notice)


def _apply(model: nn.ModuleDict, family: "Family", path: Path, modules: Lycoris) -> str:
    """Onto the bare base; returns who did it."""
    loader = reader_for(family) if "unet" not in model else None
    kohya = is_kohya(read_header(path, path.name)[0])
    if loader is not None and loader.__name__ in LOKR_READERS and not kohya and _is_lokr(modules):
        state, metadata = loader.lora_state_dict(str(path), local_files_only=True, return_lora_metadata=True)
        loader.load_lora_into_transformer(state, transformer=model["transformer"], metadata=metadata)
        return f"diffusers {diffusers_library.__version__}"
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Changed(model.get_submodule(name), module))
    return t(
        pt="releitura própria (o diffusers não lê este arquivo)", en="our own reader (diffusers does not read this file)"
    )


def _is_lokr(modules: Lycoris) -> bool:
    return not any("hada_w1_a" in module.factors for module in modules.values())
