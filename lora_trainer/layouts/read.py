"""Reading a LoRA file of either layout, and saying in words how it differs from the adapter it should go into.

Tensors come back in float32 whatever the file holds (fp8 included): a LoRA is never trained in less.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..config.names import shown
from ..errors import SourceError, t
from ..files.headers import read_header
from . import diffusers, fused, kohya
from .lora import Lora

_OTHER_KINDS = {"hada_w1": "LoHa", "lokr_w": "LoKr", "lora_mid": "LoCon (CP)", "oft_": "OFT", "diff_b": "diff"}


@dataclass(frozen=True)
class LoraFile:
    lora: Lora
    strangers: list[str]
    """Names in the file that no module of the model has."""
    metadata: dict[str, str]


def read_tensors(path: Path, what: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor as stored, and the metadata. `what` is the option that names the file."""
    what = what or shown("model", "initial_lora")
    if not path.is_file():
        raise SourceError(t(pt=f"o arquivo {path} não existe", en=f"the file {path} does not exist"), where=what)
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
    slots: fused.Slots | None = None,
) -> LoraFile:
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


def differences(file: LoraFile, live: Lora) -> list[str]:
    """Empty if the file fits the adapter: same modules, ranks and kind. One line for each kind of difference."""
    lines = name_lines(file.strangers, file.lora.keys(), live.keys())
    common = sorted(live.keys() & file.lora.keys())
    ranks = Counter((file.lora[p].rank, live[p].rank) for p in common if file.lora[p].rank != live[p].rank)
    for (theirs, ours), count in sorted(ranks.items()):
        lines.append(
            t(
                pt=f"rank {theirs} no arquivo, {ours} na configuração, em {count} módulos",
                en=f"rank {theirs} in the file, {ours} in the config, in {count} modules",
            )
        )
    if shapes := [p for p in common if _layer_shape(file.lora, p) != _layer_shape(live, p)]:
        lines.append(
            t(
                pt=f"{len(shapes)} camadas têm outro tamanho: o arquivo é de outra família de modelo",
                en=f"{len(shapes)} layers have another size: the file is of another model family",
            )
        )
    if broken := [p for p in common if file.lora[p].up.shape[1:2] != file.lora[p].down.shape[:1]]:
        lines.append(
            t(
                pt=f"{len(broken)} módulos do arquivo têm matrizes que não se multiplicam ({_sample(broken)})",
                en=f"{len(broken)} modules of the file have matrices that do not multiply ({_sample(broken)})",
            )
        )
    dora = [p for p in common if (file.lora[p].magnitude is None) != (live[p].magnitude is None)]
    if dora:
        theirs_word, ours_word = ("sem", "com") if file.lora[dora[0]].magnitude is None else ("com", "sem")
        english = {"sem": "without", "com": "with"}
        lines.append(
            t(
                pt=f"{theirs_word} DoRA no arquivo, {ours_word} DoRA na configuração",
                en=f"{english[theirs_word]} DoRA in the file, {english[ours_word]} DoRA in the config",
            )
        )
    return lines


def name_lines(strangers: Sequence[str], theirs: Collection[str], ours: Collection[str]) -> list[str]:
    """What the file has and the adapter has not, and the other way round."""
    lines = []
    if halves := sorted(set(strangers) & set(ours)):
        lines.append(
            t(
                pt=f"o arquivo está incompleto: de {len(halves)} módulos só tem uma parte das matrizes ({_sample(halves)})",
                en=f"the file is incomplete: of {len(halves)} modules it has only some of the matrices ({_sample(halves)})",
            )
        )
        strangers, theirs = [name for name in strangers if name not in halves], {*theirs, *halves}
    if strangers:
        lines.append(
            t(
                pt=f"{len(strangers)} módulos do arquivo não recebem LoRA aqui ({_sample(strangers)})",
                en=f"{len(strangers)} modules of the file get no LoRA here ({_sample(strangers)})",
            )
        )
    if missing := sorted(set(ours) - set(theirs)):
        lines.append(
            t(
                pt=f"{len(missing)} módulos que recebem LoRA aqui faltam no arquivo ({_sample(missing)})",
                en=f"{len(missing)} modules that get a LoRA here are missing in the file ({_sample(missing)})",
            )
        )
    return lines


def _layer_shape(lora: Lora, path: str) -> tuple[int, ...]:
    return (lora[path].up.shape[0], *lora[path].down.shape[1:])


def _sample(names: Sequence[str]) -> str:
    return names[0] + (", …" if len(names) > 1 else "")


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
    for mark, kind in _OTHER_KINDS.items():
        if any(mark in key for key in tensors):
            raise SourceError(
                t(pt=f"o arquivo é um {kind}, não um LoRA comum", en=f"the file is a {kind}, not a plain LoRA"),
                t(
                    pt="use um LoRA com lora_down/lora_up ou lora_A/lora_B",
                    en="use a LoRA with lora_down/lora_up or lora_A/lora_B",
                ),
                str(path),
            )
    if not any(".lora" in key for key in tensors):
        raise SourceError(
            t(
                pt="o arquivo não tem camadas LoRA; parece um modelo completo ou outro tipo de arquivo",
                en="the file has no LoRA layers; it looks like a whole model or another kind of file",
            ),
            where=str(path),
        )
