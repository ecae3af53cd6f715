"""What llama.cpp calls the parameters of a transformers model, and how its converter changes them.

Names come from the `gguf` package's own table, so a model is matched by its parameters' names. What llama.cpp's converter
does to values is known for each architecture listed here, and undone:

- `rope` "pairs": it orders the rows of the query and key matrices so that the two rows that rotate together are
  neighbours (transformers keeps them half a head apart). Whole rows move, so it is undone without unpacking a block.
- `norm_shift`: it stores the factors of Gemma's norms as 1 + w.

- experts: it stacks the matrices of a layer's experts in one tensor. Each is a run of its rows.

An architecture that is not listed is refused: a model read without its changes undone would train, and be wrong.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

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
EXPERT = r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight"
"""As families/causal_lm/weights.py names the matrices of one expert."""
WITHOUT_PARAMETER = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the config (files/gguf_config.py)."""


def architecture(file: GgufFile, what: str = "modelo_base") -> Architecture:
    """SourceError for one whose changes are not known here."""
    found = ARCHITECTURES.get(file.architecture)
    experts = any("_exps." in name for name in file.tensors)
    if found is not None and found.experts == experts:
        return found
    name = file.architecture or t(pt="sem nome", en="without a name")
    extra = t(pt=" com especialistas (MoE)", en=" with experts (MoE)") if experts else ""
    raise SourceError.said(
        pt=f"ainda não leio GGUF da arquitetura {name}{extra}: {file.path.name}",
        en=f"GGUF files of the architecture {name}{extra} are not read yet: {file.path.name}",
        hint_pt=f"use a pasta do modelo em safetensors, ou um GGUF de {', '.join(ARCHITECTURES)}",
        hint_en=f"use the model's safetensors folder, or a GGUF of {', '.join(ARCHITECTURES)}",
        where=what,
    )


def tensor_name(parameter: str, arch: str) -> str | None:
    """What llama.cpp's converter calls a parameter of such a model, "model.layers.3.mlp.up_proj.weight"; None where it has none."""
    if (expert := re.fullmatch(EXPERT, parameter)) is not None:
        return f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight"
    number = re.search(r"\.\d+\.", parameter)
    found = _table(arch).get_name(re.sub(r"\.\d+\.", ".0.", parameter, count=1), try_suffixes=(".weight", ".bias"))
    return found.replace(".0.", number[0], 1) if found and number else found


@functools.cache
def _table(arch: str) -> Any:
    """The `gguf` package's, for one block."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    return get_tensor_name_map(next(each for each, name in MODEL_ARCH_NAMES.items() if name == arch), 1)


def paired_heads(arch: str, tensor: str, heads: tuple[int, int]) -> int:
    """Heads of a query or key tensor (or bias) whose rows llama.cpp keeps in pairs; 0 where it does not. `heads`: of queries,
    of keys."""
    part = tensor.split(".")[2:3]
    if arch not in ARCHITECTURES or ARCHITECTURES[arch].rope == "halves" or part not in (["attn_q"], ["attn_k"]):
        return 0
    return heads[part == ["attn_k"]]
