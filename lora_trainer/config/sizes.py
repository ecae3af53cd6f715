"""How many parameters a base has, told from headers or config.json without torch: what `tamanhos:` sections go by.

Headers are exact. A config.json alone (planning from a shape) is worked out for decoders of the usual kind: attention with
grouped heads, a gated MLP or a mixture of them; norms and biases are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ..gguf.reader import is_gguf, open_gguf
from ..headers import read_header
from ..sources import Source

BILLION = 1e9


def billions(source: Source) -> float | None:
    """None where nothing tells."""
    if source.kind == "file":
        tensors: Mapping[str, Any] = source.header
        if is_gguf(source.path):
            tensors = open_gguf(source.path, source.what).tensors
        return _counted([tensors])
    files = replace(source, planning=True).weight_files("")
    if files:
        return _counted(read_header(path, source.what)[0] for path in files)
    config = source.config("")
    return None if config is None else _of_config(config)


def section_for(bounds: Iterable[float], size: float | None) -> float | None:
    """The smallest bound that is not below the size; the largest for what is larger still."""
    bounds = sorted(bounds)
    if size is None or not bounds:
        return None
    return next((bound for bound in bounds if size <= bound), bounds[-1])


def _counted(headers: Iterable[Mapping[str, Any]]) -> float:
    return sum(prod(info.shape) for header in headers for info in header.values()) / BILLION


def _of_config(config: Mapping[str, Any]) -> float | None:
    try:
        width, layers, heads = (int(config[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
        grouped = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or width // heads)
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        expert = int(config.get("moe_intermediate_size") or inner)
    except (KeyError, TypeError, ValueError):
        return None
    attention = 2 * width * head * (heads + grouped)
    mlp = 3 * width * (experts * expert if experts else inner)
    tied = config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma"))
    return (layers * (attention + mlp) + vocabulary * width * (1 if tied else 2)) / BILLION
