"""Which tensor of a GGUF file holds which parameter of a transformers model, and how llama.cpp changed it on the way.

Names come from the `gguf` package's own table, so a model is matched by its parameters' names. What llama.cpp's converter
does to values is known for each architecture listed here, and undone:

- `rope` "pairs": it orders the rows of the query and key matrices so that the two rows that rotate together are
  neighbours (transformers keeps them half a head apart). Whole rows move, so it is undone without unpacking a block.
- `norm_shift`: it stores the factors of Gemma's norms as 1 + w.

- experts: it stacks the matrices of a layer's experts in one tensor. Each is a run of its rows.

An architecture that is not listed is refused: a model read without its changes undone would train, and be wrong.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ..errors import SourceError, t
from .gguf_reader import GgufFile


@dataclass(frozen=True)
class Architecture:
    """A `general.architecture` of llama.cpp, in transformers' terms."""

    model_type: str
    rope: Literal["halves", "pairs"] = "halves"
    norm_shift: float = 0.0
    experts: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", rope="pairs"),
    "granite": Architecture("granite", rope="pairs"),
    "smollm3": Architecture("smollm3", rope="pairs"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", experts=True),
    "qwen3moe": Architecture("qwen3_moe", experts=True),
    "phi3": Architecture("phi3"),
    "gemma": Architecture("gemma", norm_shift=-1.0),
    "gemma2": Architecture("gemma2", norm_shift=-1.0),
    "gemma3": Architecture("gemma3_text", norm_shift=-1.0),
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
"""As families/causal_lm/weights.py names the matrices of one expert."""
WITHOUT_PARAMETER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config (files/gguf_config.py)."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies: a tensor; the rows it takes (first, number; None: all) and their order (None: as they are).

    `shift` is added to the values.
    """

    tensor: str
    part: tuple[int, int] | None = None
    order: Tensor | None = None
    shift: float = 0.0


def architecture(file: GgufFile, what: str = "modelo_base") -> Architecture:
    """SourceError for one whose changes are not known here."""
    found = ARCHITECTURES.get(file.architecture)
    experts = any("_exps." in name for name in file.tensors)
    if found is not None and found.experts == experts:
        return found
    name = file.architecture or t(pt="sem nome", en="without a name")
    extra = t(pt=" com especialistas (MoE)", en=" with experts (MoE)") if experts else ""
    raise SourceError(
        t(
            pt=f"ainda não leio GGUF da arquitetura {name}{extra}: {file.path.name}",
            en=f"GGUF files of the architecture {name}{extra} are not read yet: {file.path.name}",
        ),
        t(
            pt=f"use a pasta do modelo em safetensors, ou um GGUF de {', '.join(ARCHITECTURES)}",
            en=f"use the model's safetensors folder, or a GGUF of {', '.join(ARCHITECTURES)}",
        ),
        what,
    )


def places(file: GgufFile, parameters: Mapping[str, tuple[int, ...]], what: str = "modelo_base") -> dict[str, Place]:
    """Parameter name -> its place, for names and shapes as in a model's `state_dict`.

    SourceError naming a few where parameters are missing, have another shape, or tensors belong to none.
    """
    known = architecture(file, what)
    found: dict[str, Place] = {}
    missing, misshapen = [], []
    for name, tensor in tensor_names(file, parameters).items():
        info, shape = file.tensors.get(tensor), tuple(parameters[name])
        if info is None:
            missing.append(tensor)
            continue
        stored, part = info.shape, None
        if (match := _EXPERT.fullmatch(name)) is not None:
            stored, part = info.shape[1:], (int(match[2]) * info.shape[-2], info.shape[-2])
        if _bare(stored) != _bare(shape) or (part and sum(part) > prod(info.shape[:-1])):
            misshapen.append(f"{tensor} {list(info.shape)} ≠ {list(shape)}")
        shift = known.norm_shift if tensor.endswith("norm.weight") else 0.0
        found[name] = Place(tensor, part, row_order(file, tensor), shift)
    used = {place.tensor for place in found.values()}
    unused = [name for name in file.tensors if name not in used and name not in WITHOUT_PARAMETER]
    _refuse(file, missing, misshapen, unused, what)
    return found


def tensor_names(file: GgufFile, parameters: Collection[str]) -> dict[str, str]:
    """Parameter name -> tensor name; a head without a tensor of its own is the embedding."""
    num_layers = int(file.metadata.get(f"{file.architecture}.block_count", 0))
    names = {name: name for name in parameters} | converted_names(parameters, file.architecture, num_layers)
    if "output.weight" not in file.tensors:
        names |= {name: "token_embd.weight" for name in parameters if name == "lm_head.weight"}
    return names


def converted_names(parameters: Iterable[str], arch: str, num_layers: int) -> dict[str, str]:
    """What llama.cpp's converter calls the parameters of such a model, of those that it knows."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    table = get_tensor_name_map(next(a for a, name in MODEL_ARCH_NAMES.items() if name == arch), num_layers)
    names = {}
    for name in parameters:
        if (match := _EXPERT.fullmatch(name)) is not None:
            names[name] = f"blk.{match[1]}.ffn_{match[3]}_exps.weight"
        elif (tensor := table.get_name(name, try_suffixes=(".weight", ".bias"))) is not None:
            names[name] = tensor
    return names


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without sides of one, which llama.cpp leaves out."""
    return tuple(side for side in shape if side != 1)


def row_order(file: GgufFile, tensor: str) -> Tensor | None:
    """The rows of a query or key tensor (or bias) in transformers' order, where llama.cpp keeps another."""
    prefix = f"{file.architecture}.attention"
    heads = file.metadata.get(f"{prefix}.head_count", 1)
    both = (heads, file.metadata.get(f"{prefix}.head_count_kv", heads))
    return rope_order(file.architecture, tensor, file.tensors[tensor].shape[0], both)


def rope_order(arch: str, tensor: str, rows: int, heads: tuple[int, int]) -> Tensor | None:
    """Row i of transformers is row `order[i]` of llama.cpp; None where they agree. `heads`: of queries, of keys."""
    part = tensor.split(".")[2:3]
    if arch not in ARCHITECTURES or ARCHITECTURES[arch].rope == "halves" or part not in (["attn_q"], ["attn_k"]):
        return None
    return torch.arange(rows).view(heads[part == ["attn_k"]], -1, 2).transpose(1, 2).reshape(-1)


def _refuse(file: GgufFile, missing: list[str], misshapen: list[str], unused: list[str], what: str) -> None:
    def few(names: list[str]) -> str:
        return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")

    problems = [
        (missing, t(pt="faltam tensores", en="tensors are missing")),
        (misshapen, t(pt="tensores de outro formato", en="tensors of another shape")),
        (unused, t(pt="tensores que o modelo não tem", en="tensors the model does not have")),
    ]
    if any(names for names, _ in problems):
        listed = "; ".join(f"{title}: {few(names)}" for names, title in problems if names)
        raise SourceError(
            f"{file.path.name}: {listed}",
            t(
                pt="o arquivo está incompleto ou é de uma variante que não conheço: baixe-o de novo, ou use a pasta do "
                "modelo em safetensors",
                en="the file is incomplete or of a variant not known here: download it again, or use the model's "
                "safetensors folder",
            ),
            what,
        )
