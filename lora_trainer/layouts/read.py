"""Reading a LoRA file of either layout, and what of files is refused by name.

Tensors come back in float32 whatever the file holds (fp8 included): a LoRA is never trained in less.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..config.names import shown
from ..errors import SourceError, t
from ..files.headers import read_header
from ..seam.slots import Slots
from . import diffusers, fused, kohya
from .lora import LoraModule
from .lycoris import TITLES, LycorisModule, kind_of

_OTHER_KINDS = {"hada_w1": "LoHa", "lokr_w": "LoKr", "lora_mid": "LoCon (CP)", "oft_": "OFT", "diff_b": "diff"}
_OTHER_FORMS = {"hada_t1": "Tucker", "lokr_t2": "Tucker", "dora_scale": "DoRA"}


Module = TypeVar("Module", LoraModule, LycorisModule)


@dataclass(frozen=True)
class LoraFile(Generic[Module]):
    lora: dict[str, Module]
    strangers: list[str]
    """Names in the file that no module of the model has."""
    metadata: dict[str, str]


def read_tensors(path: Path, what: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor as stored, and the metadata. `what` is the option that names the file."""
    what = what or shown("model", "initial_lora")
    if not path.is_file():
        raise SourceError.said(pt=f"o arquivo {path} não existe", en=f"the file {path} does not exist", where=what)
    _, metadata = read_header(path, what)
    try:
        return load_file(path), metadata
    except SafetensorError as error:  # the library is stricter than our header check: gaps, bytes left over
        raise damaged(path, error) from error


def read_lora(
    path: Path,
    paths: list[str],
    prefixes: Mapping[str, str],
    layers_per_block: int = 2,
    slots: Slots | None = None,
) -> LoraFile[LoraModule]:
    """`paths`: the module paths the model can take; `prefixes`: part -> kohya prefix; `slots`: of fused.py."""
    tensors, metadata = read_as_float32(path, lambda stored: refuse_other_kinds(stored, path))
    try:
        if any(key.startswith("base_model.") for key in tensors):
            metadata = diffusers.with_peft_config(metadata, path.with_name("adapter_config.json"), paths)
        tensors = tensors if slots is None else fused.respelled(tensors, paths, slots)
        if slots is not None and is_kohya(tensors):
            lora, strangers = fused.unpack(tensors, [path for path in paths if slots(path)], slots)
        elif is_kohya(tensors):
            lora, strangers = kohya.unpack(tensors, paths, prefixes, layers_per_block)
        else:
            lora, strangers = diffusers.unpack(tensors, paths, metadata)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
            re.error) as error:
        raise damaged(path, error) from error  # tensors or metadata that are not what their names say
    return LoraFile(lora, strangers, metadata)


def read_as_float32(
    path: Path, refuse: Callable[[Mapping[str, Tensor]], None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor in float32, all finite, and the metadata; `refuse` looks at what is stored first."""
    stored, metadata = read_tensors(path)
    refuse(stored)
    return {key: _as_float32(key, tensor, path) for key, tensor in stored.items()}, metadata


def is_kohya(names: Iterable[str]) -> bool:
    return any(name.startswith(("lora_unet_", "lora_te", "lora_transformer_", "lycoris_")) for name in names)


def damaged(path: Path, error: Exception) -> SourceError:
    return SourceError(
        t(pt=f"o arquivo está estragado ({error})", en=f"the file is damaged ({error})"),
        t(pt="baixe ou grave o arquivo de novo", en="download or save the file again"),
        str(path),
    )


def _as_float32(key: str, tensor: Tensor, path: Path) -> Tensor:
    value = tensor.to(torch.float32)
    if not bool(value.isfinite().all()):
        raise SourceError(
            t(pt=f"o tensor `{key}` tem NaN ou infinito", en=f"tensor `{key}` has NaN or infinity"),
            t(pt="use um LoRA salvo antes de o treino divergir", en="use a LoRA saved before the training diverged"),
            str(path),
        )
    return value


def refuse_other_kinds(tensors: Mapping[str, Tensor], path: Path) -> None:
    kind = next((kind for mark, kind in _OTHER_KINDS.items() if any(mark in key for key in tensors)), None)
    if kind:
        raise SourceError.said(
            pt=f"o arquivo é um {kind}, não um LoRA comum",
            en=f"the file is a {kind}, not a plain LoRA",
            hint_pt="use um LoRA com lora_down/lora_up ou lora_A/lora_B",
            hint_en="use a LoRA with lora_down/lora_up or lora_A/lora_B",
            where=str(path),
        )
    if not any(".lora" in key for key in tensors):
        raise SourceError.said(
            pt="o arquivo não tem camadas LoRA; parece um modelo completo ou outro tipo de arquivo",
            en="the file has no LoRA layers; it looks like a whole model or another kind of file",
            where=str(path),
        )


def refuse_kind(names: Iterable[str], kind: str, path: Path) -> None:
    """A file that could be gone on from, were the config's adapter_kind another."""
    theirs = kind_of(names)
    if theirs != kind:
        said, wanted = (TITLES.get(each, "LoRA") for each in (theirs, kind))
        raise SourceError(
            t(pt=f"o arquivo é um {said}, não um {wanted}", en=f"the file is a {said}, not a {wanted}"),
            t(pt=f"use tipo_adaptador: {theirs}", en=f"use adapter_kind: {theirs}"),
            str(path),
        )


def refuse_other_forms(tensors: Mapping[str, Tensor], kind: str, path: Path) -> None:
    """All but a plain LoHa or LoKr, whichever `kind` is."""
    if kind_of(tensors) == "lora":
        refuse_other_kinds(tensors, path)
    refuse_kind(tensors, kind, path)
    ends = {key.rpartition(".")[2] for key in tensors}
    for mark in sorted(ends & _OTHER_FORMS.keys()):
        form = f"{TITLES[kind]} {t(pt='com', en='with')} {_OTHER_FORMS[mark]} ({mark})"
        raise SourceError(
            t(pt=f"o arquivo é um {form}, que não continuo", en=f"the file is a {form}, which is not continued here"),
            t(pt="use um sem essa opção", en="use one without that option"),
            str(path),
        )
