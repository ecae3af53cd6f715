"""The fastest settings that fit: what the user wrote stays, what is `auto` is solved, lossless before lossy.

A plan that is returned was simulated, never estimated. Estimates (estimate.py) only choose what to simulate next, so two
or three simulations do: the resident base with recomputation first, which tells how much must go; then either nothing at
all, or a large vocabulary's layers in host memory, whose bytes cross once where a streamed block's cross twice, then as
little streaming as will do, then activations and at last moments in host memory too, then what changes numbers within
bounds: 8-bit moments, a quantised base. Streaming comes before offloading because a byte costs the same and its copies are
known ahead. Where nothing lossless does, smaller micro-batches are tried with as many more of them a step: the batch is the same.
Resolution, length and rank are never touched.

The order of what is named here is a strategy; what else techniques declare as rungs (ladder.py) is tried on top, one by one.

A preset that was chosen by free memory leaves its memory options to the planner, but for the quantised base it may ask for:
that is part of what is trained. One that the user named comes first as it is, and is only tightened, never loosened, where
it does not fit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config.declared import value_of, with_values
from ..config.names import Key
from ..config.schema import Config
from ..machine.hardware import Precision
from ..seam.family import Family
from ..techniques.activation_offload import ActivationOffload
from ..techniques.block_streaming import BlockStreaming
from ..techniques.embedding_offload import EmbeddingOffload
from ..techniques.gradient_checkpointing import GradientCheckpointing
from ..techniques.quantize_8bit import Quantize8bit
from .estimate import Blocks, peak_at, with_examples
from .ladder import ACCUMULATION, BASE, BATCH_SIZE, LOSSY, OFF, lossless, splits, tighter, usable, with_needs
from .simulate import Prediction, Shape, meta_model, simulate_run, simulation_device
from .techniques import make_plan

CHECKPOINTING, STREAMING, OFFLOAD = GradientCheckpointing.key, BlockStreaming.key, ActivationOffload.key
EMBEDDINGS, QUANTIZATION = EmbeddingOffload.key, Quantize8bit.key
NAMED = (CHECKPOINTING, STREAMING, OFFLOAD, EMBEDDINGS)
"""What the strategy knows by name."""
STEPS = {step.key: step for step in BASE}
STREAMING_STEP = 0.05
"""Shares of streamed blocks are tried in these steps."""
ATTEMPTS = 3
"""At a share that estimates say will do."""


@dataclass(frozen=True)
class Candidate:
    """Values for the options that are the planner's, and what the simulation says of them."""

    values: dict[Key, Any]
    prediction: Prediction
    micro_batch: int

    def fits(self, available: int | None) -> bool:
        return available is None or self.peak <= available

    @property
    def peak(self) -> int:
        """Bytes, of all phases that were simulated."""
        return max(phase.total for phase in self.prediction.phases.values())

    @property
    def lossless(self) -> bool:
        return lossless(self.values)

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
    """Where simulations are kept, if anywhere (solve.py)."""
    tried: list[Candidate] = field(default_factory=list)
    """Of all sizes of micro-batches."""
    _stored: dict[str, Blocks] = field(default_factory=dict)

    def solve(self) -> Candidate:
        """The fastest candidate that fits; if none does, the one that needs least."""
        for search in (Planner._lossless, Planner._lossy):
            for size in self._micro_batches():
                planner = self.at(size)
                if planner is not self and not planner._may_fit():
                    continue
                for candidate in search(planner):
                    if candidate.fits(self.available):
                        return candidate
        return min(self.tried, key=lambda candidate: candidate.peak)

    def at(self, micro_batch: int) -> "Planner":
        """The same run in other micro-batches, with as many more of them a step."""
        if micro_batch == self.shape.batch_size:
            return self
        times = self.shape.accumulation * -(-self.shape.batch_size // micro_batch)
        split = {BATCH_SIZE: micro_batch, ACCUMULATION: times}
        return replace(
            self,
            shape=replace(self.shape, batch_size=micro_batch, accumulation=times),
            recall=lambda values, simulate: self.recall({**values, **split}, simulate),
        )

    def _micro_batches(self) -> list[int]:
        sizes = [self.shape.batch_size]
        while sizes[-1] > 1 and self.available is not None and splits(self.config):
            sizes.append(-(-sizes[-1] // 2))
        return sizes

    def _may_fit(self) -> bool:
        """Whether these micro-batches could do at best: with all that examples take shrunk."""
        size = self.shape.batch_size
        least = min(with_examples(one.prediction.phases, min(1.0, size / one.micro_batch)) for one in self.tried)
        return self.available is None or least <= self.available

    @property
    def own(self) -> list[Candidate]:
        """Tried in these micro-batches."""
        return [one for one in self.tried if one.micro_batch == self.shape.batch_size]

    def simulate(self, values: dict[Key, Any]) -> Candidate:
        """Once for each set of values."""
        known = next((one for one in self.own if one.values == values), None)
        if known is None:
            prediction = self.recall(values, lambda: self.predict(values, self.shape))
            self.tried.append(known := Candidate(values, prediction, self.shape.batch_size))
        return known

    def predict(self, values: dict[Key, Any], shape: Shape) -> Prediction:
        """One simulation, of any shape."""
        config = with_values(self.config, values)
        plan = make_plan(config, self.precision, simulation_device(), folder=Path())
        return simulate_run(self.family, config, self.precision.frozen, plan, shape)

    @cached_property
    def blocks(self) -> Blocks:
        """What streaming can take off the card: of the base as the options fixed by the user store it."""
        return self.blocks_stored(self._fixed({QUANTIZATION: "no", CHECKPOINTING: "no"})[QUANTIZATION])

    @property
    def nothing(self) -> dict[Key, Any]:
        """No option that saves memory is on; those that would change nothing for this run are not there."""
        idle = self.blocks_stored("no").idle
        return {step.key: "no" for step in usable(self.config) if step.key not in idle}

    @property
    def everything(self) -> dict[Key, Any]:
        return {**self.nothing, CHECKPOINTING: "yes", STREAMING: 1.0, OFFLOAD: "yes"}

    def _lossless(self) -> Iterator[Candidate]:
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
        for key in self._more():
            yield from self._with(key)

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

    def _more(self) -> list[Key]:
        """Rungs that change no number, beside those that the strategy names."""
        return [step.key for step in BASE if step.lossless and step.key in self.nothing and step.key not in NAMED]

    def _with(self, key: Key) -> Iterator[Candidate]:
        """One more of them on top of all, if that should do."""
        tightest = self._tightest()
        values = self._fixed({**tightest.values, key: STEPS[key].values[-1]})
        if values == tightest.values or self.available is None or _least_possible(tightest, values) > self.available:
            return
        candidate = self.simulate(values)
        if candidate.fits(self.available):
            yield from self._loosened(candidate)
        yield candidate

    def _lossy(self) -> Iterator[Candidate]:
        """On top of everything else; what cannot help enough even at best is left out."""
        tightest = self._tightest() if self.own else self.simulate(self._fixed(self.everything))
        for lossy in (extra | lossy for lossy in self._lossy_rungs() for extra in self._with_and_without()):
            values = self._fixed({**self._away(self.everything), **lossy})
            for step in LOSSY:
                on = next((one for one in step.techniques if one.on(values[step.key])), None)
                if on and not on.helps(self.config):
                    values[step.key] = self._fixed(self.nothing)[step.key]
            if values[CHECKPOINTING] != "yes":
                values = {**values, STREAMING: tightest.values[STREAMING], OFFLOAD: tightest.values[OFFLOAD]}
            without = {**values, **dict.fromkeys(self._more(), "no")}
            known = next((one for one in self.own if one.values == without), tightest)
            if self.available is not None and _least_possible(known, values) > self.available:
                continue
            candidate = self.simulate(values)
            if candidate.fits(self.available):
                yield from self._loosened(candidate)
            yield candidate

    def _lossy_rungs(self) -> Iterator[dict[Key, Any]]:
        """What changes numbers within bounds, the mildest first, each on top of those before."""
        rung = tighter({step.key: "no" for step in LOSSY}, frozenset(), "train", LOSSY)
        while rung is not None:
            yield {key: value for key, value in rung.items() if value not in OFF}
            rung = tighter(rung, frozenset(), "train", LOSSY)

    def _with_and_without(self) -> list[dict[Key, Any]]:
        more = {key: STEPS[key].values[-1] for key in self._more()}
        return [{}, more] if more else [{}]

    def _tightest(self) -> Candidate:
        return min(self.own, key=lambda candidate: candidate.peak)

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
        value = value_of(self.config, STREAMING)
        return value if self.preset_first and isinstance(value, float) else 0.0

    def _fixed(self, values: dict[Key, Any]) -> dict[Key, Any]:
        """`values`, but what the config says already stands; of a preset that comes first, what is tighter."""
        fixed = {}
        for key, value in values.items():
            own, free, tightness = value_of(self.config, key), self.free(key), STEPS[key].tightness
            a_preset_s = self.preset_first or key == QUANTIZATION
            fixed[key] = own if not free or (a_preset_s and own != "auto" and tightness(own) > tightness(value)) else value
            if key == QUANTIZATION and fixed[key] != "no" and self.blocks_stored("no").packed:
                fixed[key] = "no"  # packed in its file already, and left so (see ask.not_quantized)
        return with_needs(fixed) if self.free(CHECKPOINTING) else fixed

    def free(self, key: Key) -> bool:
        """Whether the option is the planner's to change."""
        return key not in self.written or bool(value_of(self.config, key) == "auto")

    def blocks_stored(self, quantization: str) -> Blocks:
        """The base's blocks as `quantization` stores them."""
        if quantization not in self._stored:
            config = with_values(self.config, {STREAMING: "no", EMBEDDINGS: "no", QUANTIZATION: quantization})
            plan = make_plan(config, self.precision, simulation_device(), folder=Path())
            model = meta_model(self.family, self.config, self.precision.frozen, plan)
            self._stored[quantization] = Blocks(model, self.family.blocks(model))
        return self._stored[quantization]


def _least_possible(known: Candidate, values: dict[Key, Any]) -> int:
    """Below this, what is on in `values` and not in `known` cannot bring the peak: by cause, what techniques take at most."""
    causes = max(known.prediction.phases.values(), key=lambda phase: phase.total).causes
    taken: dict[str, float] = {}
    for step in BASE:
        for technique in step.techniques:
            if technique.on(values.get(step.key)) and known.values.get(step.key) in OFF:
                for cause, share in technique.takes.items():
                    taken[cause] = max(share, taken.get(cause, 0.0))
    return known.peak - int(sum(causes[cause] * share for cause, share in taken.items()))
