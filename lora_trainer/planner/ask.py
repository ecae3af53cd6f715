"""The one way to ask what a run would need: for `plano`, for the comparison of presets and for every real run alike.

Answers are kept in the user's cache. What depends on the moment, host RAM, is decided here, outside what is kept.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..config.loading import Loaded
from ..config.names import Key, shown
from ..config.schema import Config, MemoryConfig
from ..errors import t
from ..files.sources import Source, open_source
from ..machine.allowance import user_cache
from ..machine.card import Card
from ..machine.hardware import choose_precision
from ..machine.ram import Ram, ram_budget
from ..techniques.block_streaming import MASTER, BlockStreaming
from ..techniques.quantize_8bit import Quantize8bit
from .foresee import Foresight, Question, known_answer
from .picker import Choice

MAPPED_MASTER, STREAMING = MASTER.key, BlockStreaming.key
PRESET: Key = ("memory", "preset")
COMMON = Card("", (8, 0))
"""Of the RTX 30 series: bf16."""


def ask(
    loaded: Loaded,
    choice: Choice,
    source: Source | None,
    precision_name: str,
    *,
    worst: tuple[int, tuple[int, int] | None],
    ram: Ram | None = None,
) -> Foresight:
    """`worst`: rows of the largest micro-batch and their size, None for the largest that
    the config allows. Options in `loaded.written` are the user's.

    A preset named by the user comes first as it is (see plan.py). `source` None stands for the shipped architecture.
    """
    config, (batch_size, size) = loaded.config, worst
    question = Question(
        config,
        None if source is None else replace(source, planning=True),
        precision_name,
        batch_size,
        size,
        choice.available,
        frozenset(loaded.written),
        preset_first=PRESET in loaded.written and config.memory.preset not in ("auto", "none"),
    )
    folder = user_cache() / "plans"
    found = known_answer(question, folder)
    if found is None:
        from .solve import foresee

        found = foresee(question, folder)
    return with_mapped_master(found, config.memory, ram or Ram.read())


def ask_of_config(loaded: Loaded, choice: Choice, ram: Ram | None = None) -> Foresight:
    """Where there is no run: all that the config itself tells."""
    model, training = loaded.config.model, loaded.config.training
    base = model.base_or_architecture
    source = open_source(base, shown("model", "base_model")) if base else None
    precision = choose_precision(training.mixed_precision, *_computing(choice))
    return ask(loaded, choice, source, precision.name, worst=(training.batch_size, None), ram=ram)


def _computing(choice: Choice) -> tuple[torch.device, Card | None]:
    """Where the run would; a card that is only imitated is taken for a common one of today."""
    if choice.card is None and choice.budget is not None:
        return torch.device("cuda"), COMMON
    return choice.device, choice.card


def with_mapped_master(found: Foresight, memory: MemoryConfig, ram: Ram) -> Foresight:
    """Streamed from a file instead, where host RAM would not hold the blocks and the user leaves the choice open."""
    streams = isinstance(found.values[STREAMING], float)
    if memory.mapped_master != "auto" or not streams or found.host <= ram_budget(memory, ram):
        return found
    return replace(found, values={**found.values, MAPPED_MASTER: "yes"})


def not_quantized(config: Config, values: Mapping[Key, Any]) -> str | None:
    """A notice where the base stays as its file packs it, whatever the config says."""
    asked = config.memory.base_quantization
    if asked in ("auto", "no") or values[Quantize8bit.key] != "no":
        return None
    return t(
        pt=f"o modelo base já vem empacotado no arquivo e fica assim: quantizacao_base: {asked} não se aplica",
        en=f"the base comes packed in its file and stays so: base_quantization: {asked} does not apply",
    )
