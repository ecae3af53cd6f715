"""A LoRA that the frozen base wears while it is trained, and that no file holds: what a distilled base needs to survive.

Trained as it is, a few-step model first forgets its few steps. With a LoRA on it that has forgotten them already (ostris'
training adapters, Z-Image-Turbo and FLUX.1 schnell), the new one learns from the images only what is new in them; without
that LoRA, the few steps are back. It is a branch beside each layer, never merged, so a base that is packed, streamed or both
stays as it is, and previews and validation of the file do without it. Left out: DoRA, and LoRAs of text encoders.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.names import shown
from ..config.schema import ModelConfig
from ..engine.branch import BRANCH, Branch, add_branch
from ..engine.tracker import host_memory
from ..errors import SourceError, t
from ..files.headers import read_header
from ..layouts import Lora, LoraModule, read_lora
from ..seam.family import Family

_META = torch.device("meta")


def wear(model: nn.ModuleDict, family: Family, settings: ModelConfig, dtype: torch.dtype) -> None:
    """Put `modelo.lora_de_treino`, if there is one, on a model just loaded, or on one on meta, which asks for shapes only."""
    if not settings.training_lora:
        return
    on_meta = next(model.parameters()).is_meta
    with host_memory():
        lora = _shapes(settings.training_lora, family, _layers(model)) if on_meta else _read(settings, family, _layers(model))
    for path, module in lora.items():
        layer: Any = model.get_submodule(path)
        folded = module.with_scale(1.0)
        in_host = hasattr(layer, "home")
        with host_memory(in_host):
            branch = Branch(folded.down, folded.up, dtype, _META if on_meta else layer.home if in_host else _device(layer))
        if in_host:
            branch.home = layer.home
        setattr(layer, BRANCH, branch)
        layer.register_forward_hook(add_branch)


def check(family: Family, settings: ModelConfig) -> list[str]:
    """Before anything is loaded: the file is a LoRA of this base. What to tell of it."""
    if not settings.training_lora:
        return []
    skeleton = family.load_model(_META, torch.float16)
    _shapes(settings.training_lora, family, _layers(skeleton))
    name = Path(settings.training_lora).name
    return [
        t(
            pt=f"o modelo base treina com {name} por cima; as amostras e o arquivo final são sem ele",
            en=f"the base trains with {name} on it; previews and the final file are without it",
        )
    ]


# -- reading

Shape = tuple[int, ...]


def _layers(model: nn.ModuleDict) -> dict[str, Shape]:
    """Path -> shape of the weight, of all that could wear a branch."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
    return {name: tuple(layer.weight.shape) for name, layer in found.items() if not name.startswith("text_encoder")}


def _shapes(file: str, family: Family, layers: dict[str, Shape]) -> Lora:
    """The LoRA on meta. A plan is made of dozens of simulations: the file is read for the first."""
    stat = Path(file).stat() if Path(file).is_file() else None
    stamp = (stat.st_size, stat.st_mtime_ns) if stat else None
    known = _known.setdefault((file, stamp, family.architecture()), {})
    if not known:
        for path, module in _read(ModelConfig(training_lora=file), family, layers).items():
            known[path] = LoraModule(module.down.to(_META), module.up.to(_META), 1.0)
    return known


_known: dict[Any, Lora] = {}


def _read(settings: ModelConfig, family: Family, layers: dict[str, Shape]) -> Lora:
    where = shown("model", "training_lora")
    path = Path(str(settings.training_lora))
    if not path.is_file():
        raise SourceError(
            t(pt=f"{path} não é um arquivo", en=f"{path} is not a file"),
            t(pt="dê um LoRA em .safetensors", en="give a LoRA in .safetensors"),
            where,
        )
    read_header(path, where)
    file = read_lora(path, list(layers), family.export_prefixes(), slots=family.kohya_slots)
    strangers = [name for name in file.strangers if not name.startswith(("text_encoder", "lora_te"))]
    misfits = [name for name, module in file.lora.items() if not _fits(module, layers[name])]
    if strangers or misfits or not file.lora:
        raise _foreign(path, family, [*misfits, *strangers], where)
    return file.lora


def _fits(module: LoraModule, shape: Shape) -> bool:
    rank = module.rank
    same = (module.up.shape[0], *module.down.shape[1:]) == shape and tuple(module.up.shape[1:2]) == (rank,)
    return same and module.magnitude is None


def _foreign(path: Path, family: Family, names: list[str], where: str) -> SourceError:
    listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return SourceError.said(
        pt=f"{path.name} não é um LoRA comum deste modelo base ({family.title}): {len(names)} camadas não encaixam ({listed})",
        en=f"{path.name} is no plain LoRA of this base ({family.title}): {len(names)} layers do not fit ({listed})",
        hint_pt="dê o adaptador de treino feito para este modelo base, ou apague a chave",
        hint_en="give the training adapter made for this base, or remove the key",
        where=where,
    )


def _device(layer: nn.Module) -> torch.device:
    held = [*layer._parameters.values(), *layer._buffers.values()]
    return next(tensor.device for tensor in held if tensor is not None)
