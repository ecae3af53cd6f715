"""The fastest settings that fit: what the user wrote stays, what is `auto` is solved, lossless before lossy.

A plan that is returned was simulated, never estimated. Estimates (estimate.py) only choose what to simulate next, so two
or three simulations do: the resident base with recomputation first, which tells how much must go; then either nothing at
all, or a large vocabulary's layers in host memory, whose bytes cross once where a streamed block's cross twice, then as
little streaming as will do, then activations and at last moments in host memory too, then what changes numbers within
bounds: 8-bit moments, a quantised base. Streaming comes before offloading because a byte costs the same and its copies are
known ahead. Resolution, length, rank and the batch are never touched.

A preset that was chosen by free memory leaves its memory options to the planner, but for the quantised base it may ask for:
that is part of what is trained. One that the user named comes first as it is, and is only tightened, never loosened, where
it does not fit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..choices.optimizers import OPTIMIZERS
from ..config.names import Key
from ..config.schema import Config
from ..machine.hardware import Precision
from ..seam.family import Family
from .estimate import Blocks, peak_at
from .options import (
    CHECKPOINTING,
    EMBEDDINGS,
    OFFLOAD,
    OPTIMIZER_8BIT,
    OPTIMIZER_OFFLOAD,
    QUANTIZATION,
    STREAMING,
    moments_can_leave,
    with_needs,
    with_values,
)
from .simulate import Prediction, Shape, simulate_run, simulation_device
from .techniques import make_plan

NOTHING: dict[Key, Any] = {
    CHECKPOINTING: "no", OPTIMIZER_8BIT: "no", STREAMING: "no", OFFLOAD: "no", OPTIMIZER_OFFLOAD: "no", QUANTIZATION: "no",
}  # fmt: skip
LOSSY: tuple[dict[Key, Any], ...] = (
    {OPTIMIZER_8BIT: "yes"},
    {OPTIMIZER_8BIT: "yes", QUANTIZATION: "int8"},
    {OPTIMIZER_8BIT: "yes", QUANTIZATION: "nf4"},
)
"""What changes numbers within bounds, the mildest first."""
STREAMING_STEP = 0.05
"""Shares of streamed blocks are tried in these steps."""
SAVED_QUANTIZED = {"int8": 0.5, "fp8": 0.5, "nf4": 0.75}
SAVED_8BIT = 0.75
"""At most, of the bytes of 16-bit weights and of 32-bit moments."""
ATTEMPTS = 3
"""At a share that estimates say will do."""


@dataclass(frozen=True)
class Candidate:
    """Values for the options that are the planner's, and what the simulation says of them."""

    values: dict[Key, Any]
    prediction: Prediction

    def fits(self, available: int | None) -> bool:
        return available is None or self.peak <= available

    @property
    def peak(self) -> int:
        """Bytes, of all phases that were simulated."""
        return max(phase.total for phase in self.prediction.phases.values())

    @property
    def lossless(self) -> bool:
        return self.values[OPTIMIZER_8BIT] != "yes" and self.values[QUANTIZATION] == "no"

    @property
    def share(self) -> float:
        """Of streamed blocks."""
        share = self.values[STREAMING]
        return share if isinstance(share, float) else 0.0


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
    preset_first: bool = False
    """The config lies over a preset that the user named."""
    recall: Callable[[Mapping[Key, Any], Callable[[], Prediction]], Prediction] = lambda _, simulate: simulate()
    """Where simulations are kept, if anywhere (memo.py)."""
    tried: list[Candidate] = field(default_factory=list)
    _stored: dict[str, Blocks] = field(default_factory=dict)

    def solve(self) -> Candidate:
        """The fastest candidate that fits; if none does, the one that needs least."""
        for candidate in self._candidates():
            if candidate.fits(self.available):
                return candidate
        return self._tightest()

    def simulate(self, values: dict[Key, Any]) -> Candidate:
        """Once for each set of values."""
        known = next((one for one in self.tried if one.values == values), None)
        if known is None:
            prediction = self.recall(values, lambda: self.predict(values, self.shape))
            self.tried.append(known := Candidate(values, prediction))
        return known

    def predict(self, values: dict[Key, Any], shape: Shape) -> Prediction:
        """One simulation, of any shape."""
        config = with_values(self.config, values)
        plan = make_plan(config, self.precision, simulation_device(), folder=Path())
        return simulate_run(self.family, config, self.precision.frozen, plan, shape)

    @cached_property
    def blocks(self) -> Blocks:
        """What streaming can take off the card: of the base as the options fixed by the user store it."""
        return self.blocks_stored(self._fixed(NOTHING)[QUANTIZATION])

    @property
    def nothing(self) -> dict[Key, Any]:
        """No option that saves memory is on; those that would change nothing for this base are not there."""
        values = {**NOTHING, EMBEDDINGS: "no"} if self.blocks_stored("no").vocabulary else dict(NOTHING)
        if not moments_can_leave(self.config):
            del values[OPTIMIZER_OFFLOAD]
        return values

    def _candidates(self) -> Iterator[Candidate]:
        """The first that fits is the answer. Lazily: what is simulated next depends on what was simulated before."""
        if self.preset_first or self.available is None:
            yield self.simulate(self._fixed(self.nothing))
        lean = self.simulate(self._fixed({**self.nothing, CHECKPOINTING: "yes"}))
        if lean.fits(self.available):  # nothing needs less time than recomputing nothing, and it needs more memory
            fast = self.simulate(self._fixed(self.nothing))
            yield fast
            yield from self._without_vocabulary(fast)
        yield lean
        yield from self._without_vocabulary(lean)
        if lean.values[CHECKPOINTING] == "yes":
            yield from self._streamed(lean)
            yield from self._offloaded(lean)
        yield from self._moments_away()
        yield from self._lossy()

    def _without_vocabulary(self, known: Candidate) -> Iterator[Candidate]:
        """The same with embeddings and head in host memory, if that alone should do."""
        away = self._away(known.values)
        if self.available is not None and self._peak(known, known.share, away) <= self.available:
            yield self.simulate(away)

    def _away(self, values: dict[Key, Any]) -> dict[Key, Any]:
        return self._fixed({**values, EMBEDDINGS: "yes"}) if EMBEDDINGS in values else values

    def _streamed(self, start: Candidate) -> Iterator[Candidate]:
        """As small a share as will do, by exact arithmetic on what the simulation of another share said."""
        if not self.free(STREAMING):
            return
        values = self._away(start.values)
        for _ in range(ATTEMPTS):
            share = self._least_share(start, values)
            if share is None:
                return
            start = self.simulate({**values, STREAMING: share})
            yield start

    def _offloaded(self, lean: Candidate) -> Iterator[Candidate]:
        """Activations in host memory, and of the blocks as many as that still asks for."""
        if not self.free(OFFLOAD):
            return
        full = self.simulate(self._fixed({**self._away(lean.values), STREAMING: 1.0, OFFLOAD: "yes"}))
        if full.fits(self.available):
            yield from self._loosened(full)
        yield full

    def _moments_away(self) -> Iterator[Candidate]:
        """The moments in host memory too, if that should do: copies that no computing hides."""
        tightest = self._tightest()
        values = self._fixed({**tightest.values, OPTIMIZER_OFFLOAD: "yes"})
        if OPTIMIZER_OFFLOAD not in self.nothing or values == tightest.values or self.available is None:
            return
        if _least_possible(tightest, values) > self.available:
            return
        candidate = self.simulate(values)
        if candidate.fits(self.available):
            yield from self._loosened(candidate)
        yield candidate

    def _lossy(self) -> Iterator[Candidate]:
        """On top of everything else; what cannot help enough even at best is left out."""
        tightest = self._tightest()
        for lossy in (extra | lossy for lossy in LOSSY for extra in self._with_and_without_moments()):
            everything = {**self.nothing, CHECKPOINTING: "yes", STREAMING: 1.0, OFFLOAD: "yes"}
            values = self._fixed({**self._away(everything), **lossy})
            if not self._has_8bit():
                values[OPTIMIZER_8BIT] = self._fixed(NOTHING)[OPTIMIZER_8BIT]
            if values[CHECKPOINTING] != "yes":
                values = {**values, STREAMING: tightest.values[STREAMING], OFFLOAD: tightest.values[OFFLOAD]}
            with_moments = next((one for one in self.tried if one.values == {**values, OPTIMIZER_OFFLOAD: "no"}), tightest)
            if self.available is not None and _least_possible(with_moments, values) > self.available:
                continue
            candidate = self.simulate(values)
            if candidate.fits(self.available):
                yield from self._loosened(candidate)
            yield candidate

    def _with_and_without_moments(self) -> list[dict[Key, Any]]:
        return [{}, {OPTIMIZER_OFFLOAD: "yes"}] if OPTIMIZER_OFFLOAD in self.nothing else [{}]

    def _tightest(self) -> Candidate:
        return min(self.tried, key=lambda candidate: candidate.peak)

    def _loosened(self, candidate: Candidate) -> Iterator[Candidate]:
        """The same with fewer streamed blocks, if there is room."""
        if not self.free(STREAMING) or not candidate.share:
            return
        share = self._least_share(candidate, candidate.values, floor=0.0)
        if share is not None and share < candidate.share:
            yield self.simulate({**candidate.values, STREAMING: share or "no"})

    def _least_share(self, known: Candidate, values: dict[Key, Any], floor: float | None = None) -> float | None:
        """The smallest share above `floor` (that of `known`, if not given) at which `values` should fit."""
        least = known.share + STREAMING_STEP if floor is None else floor
        least = max(least, self._preset_share())
        shares = [round(step * STREAMING_STEP, 2) for step in range(round(1 / STREAMING_STEP) + 1)]
        assert self.available is not None
        return next((s for s in shares if s >= least - 1e-9 and self._peak(known, s, values) <= self.available), None)

    def _peak(self, known: Candidate, share: float, values: dict[Key, Any]) -> int:
        """Estimated from a simulation of another share, embeddings here or there."""
        blocks = self.blocks_stored(known.values[QUANTIZATION])
        gone = blocks.vocabulary if values.get(EMBEDDINGS) == "yes" and known.values[EMBEDDINGS] == "no" else 0
        return peak_at(known.peak, known.share, share, blocks) - gone

    def _preset_share(self) -> float:
        value = _value(self.config, STREAMING)
        return value if self.preset_first and isinstance(value, float) else 0.0

    def _fixed(self, values: dict[Key, Any]) -> dict[Key, Any]:
        """`values`, but what the config says already stands; of a preset that comes first, what is tighter."""
        fixed = {}
        for key, value in values.items():
            own, free = _value(self.config, key), self.free(key)
            a_preset_s = self.preset_first or key == QUANTIZATION
            fixed[key] = own if not free or (a_preset_s and own != "auto" and _tighter(own, value)) else value
            if key == QUANTIZATION and fixed[key] != "no" and self.blocks_stored("no").packed:
                fixed[key] = "no"  # packed in its file already, and left so (see options.not_quantized)
        return with_needs(fixed) if self.free(CHECKPOINTING) else fixed

    def free(self, key: Key) -> bool:
        """Whether the option is the planner's to change."""
        return key not in self.written or bool(_value(self.config, key) == "auto")

    def _has_8bit(self) -> bool:
        training = self.config.training
        smaller = OPTIMIZERS[training.optimizer].eight_bit not in ("", training.optimizer)
        return smaller and self.config.memory.optimizer_in_backward != "yes"

    def blocks_stored(self, quantization: str) -> Blocks:
        """The base's blocks as `quantization` stores them."""
        if quantization not in self._stored:
            config = with_values(self.config, {STREAMING: "no", EMBEDDINGS: "no", QUANTIZATION: quantization})
            plan = make_plan(config, self.precision, simulation_device(), folder=Path())
            model = self.family.load_model(
                torch.device("meta"),
                self.precision.frozen,
                with_text=trains_text(self.config),
                prepare=lambda m: plan.convert(m, self.family.blocks(m)),
            )
            self._stored[quantization] = Blocks(model, self.family.blocks(model))
        return self._stored[quantization]


def trains_text(config: Config) -> bool:
    """Whether text encoders are part of the trained model."""
    return config.model.train_text_encoder or config.data.cache_text_encoder == "no"


def _least_possible(known: Candidate, values: dict[Key, Any]) -> int:
    """Below this the lossy options cannot bring the peak, even if everything frozen were made of linear layers."""
    causes = max(known.prediction.phases.values(), key=lambda phase: phase.total).causes
    gone = causes["optimizer"] * SAVED_8BIT if values[OPTIMIZER_8BIT] == "yes" else 0.0
    if values.get(OPTIMIZER_OFFLOAD) == "yes":
        gone = causes["optimizer"]
    if known.values[QUANTIZATION] == "no":
        gone += causes["frozen"] * SAVED_QUANTIZED.get(values[QUANTIZATION], 0.0)
    return known.peak - int(gone)


def _tighter(one: Any, other: Any) -> bool:
    """Of two values of an option: whether the first needs less memory."""
    if isinstance(one, float):
        return not isinstance(other, float) or one > other
    order = ("no", "yes", "fp8", "int8", "nf4")
    return not isinstance(other, float) and order.index(one) > order.index(other)


def _value(config: Config, key: Key) -> Any:
    return getattr(getattr(config, key[0]), key[1])
