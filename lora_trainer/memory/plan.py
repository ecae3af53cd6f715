"""The fastest settings that fit: what the user wrote stays, what is `auto` is solved, lossless before lossy.

Each candidate is simulated, never estimated; the numbers of one simulation only choose which candidate to try next (how
much must go tells how many blocks to stream). Candidates come in the order of what they cost in speed: nothing,
recomputation, streaming as little as will do, activations in host memory, then what changes numbers within bounds:
8-bit moments, a quantised base. Resolution, rank and the batch are never touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.names import Key
from ..config.schema import Config
from ..families._base import Family
from ..hardware import Precision
from .block_streaming import streamable_bytes
from .simulate import Prediction, Shape, simulate_training, simulation_device
from .techniques import make_plan

CHECKPOINTING: Key = ("training", "gradient_checkpointing")
OPTIMIZER_8BIT: Key = ("training", "use_8bit_optimizer")
STREAMING: Key = ("memory", "block_streaming")
OFFLOAD: Key = ("memory", "activation_offload")
QUANTIZATION: Key = ("memory", "base_quantization")
SOLVED = (CHECKPOINTING, OPTIMIZER_8BIT, STREAMING, OFFLOAD, QUANTIZATION)
NOTHING: dict[Key, Any] = {
    CHECKPOINTING: "no", OPTIMIZER_8BIT: "no", STREAMING: "no", OFFLOAD: "no", QUANTIZATION: "no",
}  # fmt: skip
LOSSY: tuple[dict[Key, Any], ...] = (
    {OPTIMIZER_8BIT: "yes"},
    {OPTIMIZER_8BIT: "yes", QUANTIZATION: "int8"},
    {OPTIMIZER_8BIT: "yes", QUANTIZATION: "nf4"},
)
"""What changes numbers within bounds, the mildest first."""
STREAMING_STEP = 0.05
"""Shares of streamed blocks are tried in these steps."""


@dataclass(frozen=True)
class Candidate:
    """Values for the options that are the planner's, and what the simulation says of them."""

    values: dict[Key, Any]
    prediction: Prediction
    lossless: bool

    def fits(self, available: int | None) -> bool:
        return available is None or self.training_peak <= available

    @property
    def training_peak(self) -> int:
        """Bytes; previews and caching have ladders of their own."""
        return max(self.prediction.phases[name].total for name in ("load", "forward", "backward", "optimizer"))


@dataclass
class Planner:
    """Solves one run. `available`: bytes for live tensors; None means as much as it takes."""

    family: Family
    config: Config
    precision: Precision
    shape: Shape
    available: int | None
    written: frozenset[Key] = frozenset()
    """Options that are the user's own; what a preset says may be changed."""
    tried: list[Candidate] = field(default_factory=list)

    def solve(self) -> Candidate:
        """The first candidate that fits; if none does, the one that needs least."""
        for values in self._candidates():
            candidate = self.simulate(values)
            if candidate.fits(self.available):
                return candidate
        return min(self.tried, key=lambda candidate: candidate.training_peak)

    def simulate(self, values: dict[Key, Any]) -> Candidate:
        config = with_values(self.config, values)
        plan = make_plan(config, self.precision, simulation_device(), folder=Path())
        prediction = simulate_training(self.family, config, self.precision.frozen, plan, self.shape)
        lossless = values[OPTIMIZER_8BIT] != "yes" and values[QUANTIZATION] == "no"
        candidate = Candidate(values, prediction, lossless)
        self.tried.append(candidate)
        return candidate

    def _candidates(self) -> Iterator[dict[Key, Any]]:
        """Lazily: what to try next depends on what was tried."""
        base = self._fixed(NOTHING)
        weights = self._weight_bytes(base)
        if self._free(CHECKPOINTING) and self._may_fit(weights):
            yield base
        base = self._fixed({**NOTHING, CHECKPOINTING: "yes"})
        if self._may_fit(weights) or not self._free(STREAMING):
            yield base
        yield from self._streamed(base, weights)
        for lossy in LOSSY:
            if any(self._free(key) for key in lossy):
                yield self._fixed({**NOTHING, CHECKPOINTING: "yes", STREAMING: 1.0, OFFLOAD: "yes", **lossy})

    def _streamed(self, base: dict[Key, Any], weights: int) -> Iterator[dict[Key, Any]]:
        """As little streaming as will do, then all of it, then with the activations in host memory too."""
        if not self._free(STREAMING):
            if self._free(OFFLOAD):
                yield {**base, OFFLOAD: "yes"}
            return
        streamable = self._streamable()
        share = self._needed_share(weights, streamable)
        while share < 1:
            candidate = {**base, STREAMING: share}
            yield candidate
            missing = self.tried[-1].training_peak - (self.available or 0)
            share = _rounded_up(share + max(missing / max(streamable, 1), STREAMING_STEP))
        yield {**base, STREAMING: 1.0}
        if self._free(OFFLOAD):
            yield {**base, STREAMING: 1.0, OFFLOAD: "yes"}

    def _needed_share(self, weights: int, streamable: int) -> float:
        """A first guess: what the last candidate lacked (or all of the weights that cannot fit), and the ring."""
        if self.available is None or not streamable:
            return 1.0
        peak = self.tried[-1].training_peak if self.tried else int(weights * 1.15)
        return max(STREAMING_STEP, _rounded_up((peak - self.available) / streamable + 0.05))

    def _fixed(self, values: dict[Key, Any]) -> dict[Key, Any]:
        """`values`, but what the config says already stands."""
        return {key: value if self._free(key) else _value(self.config, key) for key, value in values.items()}

    def _free(self, key: Key) -> bool:
        return key not in self.written or bool(_value(self.config, key) == "auto")

    def _may_fit(self, weights: int) -> bool:
        return self.available is None or weights < self.available

    def _weight_bytes(self, values: dict[Key, Any]) -> int:
        """Of the model as stored on the card without streaming: a bound, to leave out candidates that cannot fit."""
        model = self.family.load_model(torch.device("meta"), self.precision.frozen)
        share = {"nf4": 0.3, "int8": 0.5, "fp8": 0.5}.get(values[QUANTIZATION], 1.0)
        return int(sum(p.nbytes for p in model.parameters()) * share)

    def _streamable(self) -> int:
        model = self.family.load_model(torch.device("meta"), self.precision.frozen)
        return streamable_bytes(self.family.blocks(model))


def with_values(config: Config, values: dict[Key, Any]) -> Config:
    """The config with some options replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for (section, name), value in values.items():
        sections.setdefault(section, {})[name] = value
    changed = {name: getattr(config, name).model_copy(update=options) for name, options in sections.items()}
    return config.model_copy(update=changed)


def _value(config: Config, key: Key) -> Any:
    return getattr(getattr(config, key[0]), key[1])


def _rounded_up(share: float) -> float:
    return min(1.0, round(-(-share // STREAMING_STEP) * STREAMING_STEP, 2))
