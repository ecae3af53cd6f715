"""Ready-made settings for a card size: which files there are, and what of them holds for a base, by its family and size.

A preset is a config file like any other, presets/8gb.yaml; it lies between the defaults and the user's file. Its
`familias:` sections need the base's family, and `tamanhos:` in them its size; the base's header tells both without torch.

Of an image model it is the transformer's size that counts, not that of what encodes for it. Headers are exact. A config.json
alone (planning from a shape): of a decoder of the usual kind it is worked out, less norms and biases; a diffusion
transformer is built without weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import ConfigError, t
from ..files import kinds
from ..files.headers import read_header
from ..files.sources import Source, open_source
from .entries import Entry, Sheet
from .names import Key, options, shown

FOLDER = Path(__file__).parents[2] / "presets"
BILLION = 1e9
WITHIN = "model.diffusion_model."
"""Of a transformer's tensors, in files that hold text encoders and VAE too."""

YIELDS: dict[Key, tuple[Key, ...]] = {
    ("training", "batch_size"): (("training", "gradient_accumulation_steps"),),
    ("training", "gradient_accumulation_steps"): (("training", "batch_size"),),
    ("training", "gradient_checkpointing"): (("memory", "block_streaming"),),
    ("training", "optimizer"): (("training", "use_8bit_optimizer"),),
    ("memory", "optimizer_in_backward"): (("training", "gradient_accumulation_steps"),),
}
"""What the user writes -> what a preset then leaves alone, because it would say something else beside it:
`tamanho_lote: 2` is an effective batch of 2, whatever the preset accumulates."""


def names() -> tuple[str, ...]:
    """From the smallest card to the largest: "4gb", …"""
    return tuple(choice for choice in options()["memory", "preset"].choices if choice not in ("auto", "none"))


def path_of(name: str) -> Path:
    """Raises ConfigError when the preset's file is missing."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            t(pt=f"falta o arquivo do preset {name}: {path}", en=f"the file of preset {name} is missing: {path}"),
            t(pt="use --preset nenhum, ou baixe o programa de novo", en="use --preset none, or download again"),
        )
    return path


def size_gib(name: str) -> int:
    """GiB of the card the preset is made for."""
    return int(name.removesuffix("gb"))


def family_of(base_model: str | None, family: str) -> str | None:
    """The family as written, else as the base's header or config tells it. Raises SourceError for a broken base."""
    if family != "auto" or not base_model:
        return None if family == "auto" else family
    return kinds.family_of(open_source(base_model, shown("model", "base_model")).looks_like())


def size_of(base_model: str | None, family: str | None = None) -> float | None:
    """Billions of parameters. Raises SourceError for a broken base."""
    return _billions(open_source(base_model, shown("model", "base_model")), family) if base_model else None


def families() -> list[str]:
    """All families there are, told by their files' names."""
    return plugins.available("lora_trainer.families")


def sized(sheets: Sequence[Sheet], family: str | None) -> bool:
    """Whether what is said for the family depends on the base's size."""
    return any(sheet.families[family].sizes for sheet in sheets if family in sheet.families)


def flatten(sheets: Sequence[Sheet], family: str | None, size: float | None) -> Iterator[Sheet]:
    """Every sheet, followed by what it says for the family, and for its bases of this size (billions of parameters)."""
    for sheet in sheets:
        yield sheet
        if family in sheet.families:
            own = sheet.families[family]
            yield own
            if (bound := _bound_for(own.sizes, size)) is not None:
                yield own.sizes[bound]


def yielding(preset: Mapping[Key, Entry], written: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """The preset's entries, less those that give way to what the user wrote."""
    gone = {key for mine in written for key in YIELDS.get(mine, ())}
    return {key: entry for key, entry in preset.items() if key not in gone}


# -- the base's size
def _bound_for(bounds: Iterable[float], size: float | None) -> float | None:
    """The smallest bound that is not below the size; the largest for what is larger still."""
    bounds = sorted(bounds)
    if size is None or not bounds:
        return None
    return next((bound for bound in bounds if size <= bound), bounds[-1])


def _billions(source: Source, family: str | None) -> float | None:
    """None where nothing tells. `family`: asked, where only a config.json of a diffusion network is there."""
    if source.kind == "file":
        inside = {name: info for name, info in source.tensors.items() if name.startswith(WITHIN)}
        return _counted([inside or source.tensors])
    sub = "transformer" if source.config("transformer") else ""
    files = replace(source, planning=True).weight_files(sub)
    if files:
        return _counted(read_header(path, source.what)[0] for path in files)
    config = source.config(sub)
    if config is not None and "_class_name" in config:
        owner = plugins.load(f"lora_trainer.families.{family}", "family").FAMILY if family else None
        return owner.count_parameters(config) / BILLION or None if owner else None
    return None if config is None else _of_config(config)


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
