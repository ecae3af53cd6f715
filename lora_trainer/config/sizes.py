"""How many parameters a base has, told from headers or config.json: what `tamanhos:` sections go by.

Of an image model it is the transformer that counts, not what encodes for it. Headers are exact. A config.json alone (planning
from a shape): of a decoder of the usual kind it is worked out without torch, less norms and biases; a diffusion transformer
is built without weights.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from .. import plugins
from ..files.gguf_reader import is_gguf, open_gguf
from ..files.headers import read_header
from ..files.sources import Source

BILLION = 1e9
WITHIN = "model.diffusion_model."
"""In files that hold text encoders and VAE too."""


def billions(source: Source, family: str | None = None) -> float | None:
    """None where nothing tells. `family`: asked, where only a config.json of a diffusion network is there."""
    if source.kind == "file":
        tensors: Mapping[str, Any] = source.header
        if is_gguf(source.path):
            tensors = open_gguf(source.path, source.what).tensors
        inside = {name: info for name, info in tensors.items() if name.startswith(WITHIN)}
        return _counted([inside or tensors])
    sub = "transformer" if source.config("transformer") else ""
    files = replace(source, planning=True).weight_files(sub)
    if files:
        return _counted(read_header(path, source.what)[0] for path in files)
    config = source.config(sub)
    if config is not None and "_class_name" in config:
        owner = plugins.load(f"lora_trainer.families.{family}", "family").FAMILY if family else None
        return owner.count_parameters(config) / BILLION or None if owner else None
    return None if config is None else _of_config(config)


def section_for(bounds: Iterable[float], size: float | None) -> float | None:
    """The smallest bound that is not below the size; the largest for what is larger still."""
    bounds = sorted(bounds)
    if size is None or not bounds:
        return None
    return next((bound for bound in bounds if size <= bound), bounds[-1])


def _counted(headers: Iterable[Mapping[str, Any]]) -> float:
    """Two weights of 4 bits lie in a byte."""
    every = (info for header in headers for info in header.values())
    return sum(prod(info.shape) * (2 if getattr(info, "dtype", "") == "U8" else 1) for info in every) / BILLION


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
