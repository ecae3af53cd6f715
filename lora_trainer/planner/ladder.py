"""The one ladder: smaller micro-batches, then every rung that techniques declare, the mildest first.

The planner, recovery in mid-run, the caching phase and the advice all walk it; no rung is listed here. What changes numbers
is for the planner and the advice: after an out-of-memory in mid-run only lossless rungs are taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config.declared import PACKAGE, Declared, Key, options, sharing, techniques, value_of, with_values
from ..config.schema import Config
from ..plugins import load
from ..seam.technique import Technique

MICRO_BATCH: Key = ("training", "micro_batch")
"""No option, but fixed where a window cannot be split."""
BATCH_SIZE: Key = ("training", "batch_size")
ACCUMULATION: Key = ("training", "gradient_accumulation_steps")
OFF = (None, "no", "auto", False)


@dataclass(frozen=True)
class Rung:
    """How a window is computed: the options in force, and the most examples at once."""

    values: Mapping[Key, Any]
    micro_batch: int


@dataclass(frozen=True)
class Step:
    """An option of the ladder."""

    option: Declared
    techniques: tuple[type[Technique], ...]
    """The mildest first; one, unless they share the option."""

    @property
    def key(self) -> Key:
        return self.option.key

    @property
    def chosen(self) -> tuple[type[Technique], ...]:
        """Those that the program may choose."""
        return tuple(technique for technique in self.techniques if not technique.asked_only)

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """What the program may set it to, the tightest last."""
        if self.option.kind is None:
            return tuple(technique.value for technique in self.chosen)
        return self.option.steps

    @property
    def lossless(self) -> bool:
        return all(technique.lossless for technique in self.techniques)

    def tightness(self, value: Any) -> float:
        """Grows with what a value takes off the card; 0 is off."""
        if isinstance(value, float):
            return value
        if value in OFF:
            return 0.0
        if self.option.kind is not None and value in self.option.steps:
            return 1.0 + self.option.steps.index(value)
        return 1.0 + next((place for place, one in enumerate(self.techniques) if one.value == value), 0)

    def after(self, value: Any) -> Any:
        """The next tighter value that the program may set; None for the last."""
        return next((one for one in self.values if self.tightness(one) > self.tightness(value)), None)

    @cached_property
    def needed(self) -> dict[Key, Any]:
        """What must be on as well, and its value. Of a technique's other options nothing is needed: they act elsewhere."""
        own = (load(PACKAGE, name).TECHNIQUE for one in self.techniques if one.key == self.key for name in one.needs)
        return {one.key: one.value for one in own}

    def bringing(self, values: Mapping[Key, Any]) -> dict[Key, Any]:
        """`values` with what this one needs switched on; what is on already stays as it is."""
        return {**values, **{key: value for key, value in self.needed.items() if values.get(key) in OFF}}


def _steps() -> Iterator[Step]:
    for option in options().values():
        step = Step(option, tuple(sharing(option.key)))
        if option.phases and step.chosen:
            yield step


LADDER = tuple(sorted(_steps(), key=lambda step: step.chosen[0].mildness))
BASE = tuple(step for step in LADDER if "train" in step.option.phases)
"""Those that act on what is trained, which the planner solves."""
LOSSY = tuple(step for step in BASE if not step.lossless)
_SHOWN = sorted(BASE, key=lambda step: (step.techniques[0].some_bases, step.key[0] != "training", step.option.place))
SOLVED = tuple(step.key for step in _SHOWN)
"""In the order of a plan's values."""


def tighter(values: Mapping[Key, Any], fixed: frozenset[Key], phase: str, steps: tuple[Step, ...]) -> dict[Key, Any] | None:
    """The next rung of `steps` that helps in a phase. Options that mean nothing to a run (a base without a vocabulary, an
    optimizer that cannot be taken apart) are not among a plan's values."""
    for step in steps:
        value = step.after(values.get(step.key))
        barred = any(key in fixed and values.get(key) == "no" for key in step.needed)
        if phase in step.option.phases and step.key in values and step.key not in fixed and value is not None and not barred:
            return {**step.bringing(values), step.key: value}
    return None


def next_rung(rung: Rung, fixed: frozenset[Key] = frozenset(), phase: str = "train") -> Rung | None:
    """The next tighter way to compute a window that changes no number; None below the last. `fixed`: options that are not ours
    to change."""
    if rung.micro_batch > 1 and MICRO_BATCH not in fixed and phase in ("train", "validation"):
        return Rung(rung.values, -(-rung.micro_batch // 2))
    values = tighter(rung.values, fixed, phase, tuple(step for step in BASE if step.lossless))
    return None if values is None else Rung(values, rung.micro_batch)


def splits(config: Config) -> bool:
    """Whether a window may be made of more and smaller micro-batches."""
    split = with_values(config, {ACCUMULATION: 2})
    found = (conflict for technique in techniques() if technique.is_on(config) for conflict in technique.excludes)
    return not any(conflict.holds(split) and not conflict.holds(config) for conflict in found)


def with_needs(values: Mapping[Key, Any]) -> dict[Key, Any]:
    """What is only of use, or only possible, beside another technique brings that along."""
    found = dict(values)
    for step in BASE:
        found = step.bringing(found) if values.get(step.key) not in OFF else found
    return found


def lossless(values: Mapping[Key, Any]) -> bool:
    return all(values.get(step.key) in OFF for step in LOSSY)


def usable(config: Config) -> list[Step]:
    """The steps of a plan's values: those that change no number only where they may be on."""
    return [step for step in _SHOWN if not step.lossless or step.techniques[0].helps(config)]


def plain_values(config: Config) -> dict[Key, Any]:
    """The solved options as they hold where no plan has spoken: recomputation, and nothing else unless asked for.

    Whether the base has what a technique acts on is not known here: if some have not, it is left out unless the user set it.
    """
    found = {}
    for step in usable(config):
        value, technique = value_of(config, step.key), step.techniques[0]
        if value == "auto" and technique.some_bases:
            continue
        usual = "yes" if technique.on("auto") else "no"
        found[step.key] = usual if value == "auto" else value
    return found
