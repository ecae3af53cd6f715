"""The options that the planner solves, and a config with some of them replaced. Imports nothing heavy: commands start with it."""

from collections.abc import Mapping
from typing import Any

from ..choices.optimizers import OPTIMIZERS
from ..config.names import Key
from ..config.schema import Config
from ..errors import t

CHECKPOINTING: Key = ("training", "gradient_checkpointing")
OPTIMIZER_8BIT: Key = ("training", "use_8bit_optimizer")
STREAMING: Key = ("memory", "block_streaming")
OFFLOAD: Key = ("memory", "activation_offload")
QUANTIZATION: Key = ("memory", "base_quantization")
EMBEDDINGS: Key = ("memory", "embedding_offload")
"""Solved, and in a plan's values, only where the base has vocabulary layers outside its blocks."""
OPTIMIZER_OFFLOAD: Key = ("memory", "optimizer_offload")
"""The same, where the optimizer steps each parameter by itself."""
SOLVED = (CHECKPOINTING, OPTIMIZER_8BIT, EMBEDDINGS, STREAMING, OFFLOAD, OPTIMIZER_OFFLOAD, QUANTIZATION)


def moments_can_leave(config: Config) -> bool:
    """Whether `optimizer_offload` may be on."""
    return OPTIMIZERS[config.training.optimizer].separable and config.memory.optimizer_in_backward != "yes"


def with_needs(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """What is only of use, or only possible, where blocks are computed again brings that along."""
    needed = isinstance(values.get(STREAMING), float) or values.get(OFFLOAD) == "yes"
    return {**values, CHECKPOINTING: "yes"} if needed else dict(values)


def with_values(config: Config, values: dict[Key, Any]) -> Config:
    """The config with some options replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for (section, name), value in values.items():
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(config, name).model_copy(update=options) for name, options in sections.items()}
    return config.model_copy(update=changed)


def not_quantized(config: Config, values: Mapping[Key, Any]) -> str | None:
    """A notice where the base stays as its file packs it, whatever the config says."""
    asked = config.memory.base_quantization
    if asked in ("auto", "no") or values[QUANTIZATION] != "no":
        return None
    return t(
        pt=f"o modelo base já vem empacotado no arquivo e fica assim: quantizacao_base: {asked} não se aplica",
        en=f"the base comes packed in its file and stays so: base_quantization: {asked} does not apply",
    )
