"""The ladder around a solved plan: what each technique that is on saves, what the next rungs would save and cost, and, where
nothing fits, what each remedy would bring.

Where a rung was simulated its numbers are the simulation's; else they follow from it by estimate.py and are marked so.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..config.names import Key
from ..engine.tracker import PhasePeak
from ..seam.family import ImageFamily
from ..seam.technique import CACHING
from . import ladder
from .estimate import offload_saves, peak_at
from .foresee import Tried
from .ladder import BASE
from .plan import CHECKPOINTING, EMBEDDINGS, OFFLOAD, QUANTIZATION, STEPS, STREAMING, Candidate, Planner
from .simulate import simulate_captions

PASSES = 2
"""Over the blocks in a micro-batch under recomputation: one in each direction."""
_TIGHTEST_FIRST = [step for step in reversed(BASE) if step.key not in (CHECKPOINTING, OFFLOAD, STREAMING)]
COUNTS = (
    CHECKPOINTING,
    *(step.key for step in _TIGHTEST_FIRST if not step.lossless),
    OFFLOAD,
    *(step.key for step in _TIGHTEST_FIRST if step.lossless),
)
"""In what a simulation must be like a rung, to tell of it: the hardest to estimate first."""


class Rungs:
    """`best`: the planner's answer, or what came closest."""

    def __init__(self, planner: Planner, best: Candidate) -> None:
        self.planner, self.best = planner.at(best.micro_batch), best

    def below(self) -> Iterator[Tried]:
        """The rungs of ladder.py from here down."""
        shape, planner = self.planner.shape, self.planner
        fixed = frozenset(key for key in planner.written if not planner.free(key))
        rung = ladder.next_rung(ladder.Rung(self.best.values, shape.batch_size), fixed)
        while rung is not None and (tried := self._tried(dict(rung.values), rung.micro_batch)) is not None:
            yield tried
            rung = ladder.next_rung(rung, fixed)

    def without(self) -> dict[Key, int]:
        """The peak without each technique that is on, where it is known."""
        found = {}
        for key in (step.key for step in sorted(BASE, key=lambda step: step.option.place) if step.lossless):
            if self.best.values.get(key, "no") == "no":
                continue
            needing = {step.key: "no" for step in BASE if key in step.needed}
            values = {**self.best.values, **needing, key: "no"}
            if (tried := self._tried(values, self.planner.shape.batch_size)) is not None:
                found[key] = tried.peak
        return found

    def saves(self, *, simulate: bool) -> dict[Key, int]:
        """Bytes off the highest phase, by the option to change; `simulate` those two that nothing else tells."""
        phase = max(self.best.prediction.phases.values(), key=lambda peak: peak.total)
        values, batch_size = self.best.values, self.planner.shape.batch_size
        found = self._by_cause(phase)
        if values[CHECKPOINTING] == "yes":
            blocks = self.planner.blocks_stored(values[QUANTIZATION])
            found[STREAMING] = self.best.peak - peak_at(self.best.peak, self.best.share, 1.0, blocks)
            if values[OFFLOAD] != "yes":
                found[OFFLOAD] = offload_saves(self.best.prediction.phases)
        elif simulate:
            found[CHECKPOINTING] = self._simulated_saving({**values, CHECKPOINTING: "yes"}, batch_size)
        if batch_size > 1:
            rough = _of_batch(self.best.prediction.phases) * (batch_size - 1) // batch_size
            found["training", "batch_size"] = self._simulated_saving(values, 1) if simulate else rough
        family = self.planner.family
        if isinstance(family, ImageFamily) and self.planner.config.data.cache_text_encoder == "no":
            found["data", "cache_text_encoder"] = self._text_encoders(family)
        return {key: saved for key, saved in found.items() if saved > 0}

    def _by_cause(self, phase: PhasePeak) -> dict[Key, int]:
        causes, values = phase.causes, self.best.values
        trained = causes["adapter"] + causes["gradients"] + causes["optimizer"]
        found: dict[Key, int] = {("model", "lora_rank"): trained // 2}
        of_size = causes["activations"] + causes["temporary"]
        if isinstance(self.planner.family, ImageFamily):
            found["data", "resolution"] = of_size * 7 // 16  # 1 - (3/4)²
        else:
            found["data", "max_length"] = of_size // 2
        if values.get(EMBEDDINGS) == "no":
            found[EMBEDDINGS] = self.planner.blocks.vocabulary
        for step in BASE:
            takes = {} if step.key == QUANTIZATION or values.get(step.key) != "no" else step.chosen[-1].takes
            for cause, share in takes.items():
                found[step.key] = int(causes[cause] * share)
        if values[QUANTIZATION] == "no" and not self.planner.blocks.packed:
            packed = self.planner.blocks_stored(STEPS[QUANTIZATION].values[-1])
            smaller = self.planner.blocks.moved(1.0)[0] - packed.moved(1.0)[0]
            found[QUANTIZATION] = int(smaller * (1 - self.best.share))
        return found

    def _text_encoders(self, family: ImageFamily) -> int:
        """Of the frozen weights, those that training would not hold if captions were cached."""
        return simulate_captions(family, self.planner.precision.frozen).causes["frozen"]

    def _simulated_saving(self, values: dict[Key, Any], micro_batch: int) -> int:
        shape = replace(self.planner.shape, batch_size=micro_batch)
        prediction = self.planner.predict(values, shape)
        return self.best.peak - max(phase.total for phase in prediction.phases.values())

    def _tried(self, values: dict[Key, Any], micro_batch: int) -> Tried | None:
        """A rung's numbers: simulated ones if there are any, else those of the nearest simulation moved."""
        shape = self.planner.shape
        for one in self.planner.own:
            if one.values == values and micro_batch == shape.batch_size:
                return Tried(values, one.peak, one.prediction.flops, one.prediction.transferred, micro_batch)
        near = self._nearest(values)
        blocks = self.planner.blocks_stored(near.values[QUANTIZATION])
        if near.values[CHECKPOINTING] != values[CHECKPOINTING]:
            return None
        share = values[STREAMING] if isinstance(values[STREAMING], float) else 0.0
        windows, splits = shape.accumulation, -(-shape.batch_size // micro_batch)
        copied = near.prediction.transferred - PASSES * blocks.moved(near.share)[0] * windows
        copied += PASSES * blocks.moved(share)[0] * windows * splits
        phases = near.prediction.phases
        peak = peak_at(max(_of_steps(phases).values(), key=_total).total, near.share, share, blocks)
        if values.get(EMBEDDINGS) != near.values.get(EMBEDDINGS):
            sign = 1 if values[EMBEDDINGS] == "yes" else -1
            peak, copied = peak - sign * blocks.vocabulary, copied + sign * PASSES * blocks.head * windows * splits
        if values[OFFLOAD] != near.values[OFFLOAD]:
            sign = 1 if values[OFFLOAD] == "yes" else -1
            alike = [one for one in self.planner.own if one.values[CHECKPOINTING] == near.values[CHECKPOINTING]]
            saved = max(offload_saves(one.prediction.phases) for one in alike)
            peak, copied = peak - sign * saved, copied + sign * 2 * PASSES * saved * windows
        for step in BASE:
            if step.lossless and values.get(step.key) != near.values.get(step.key):
                sign, taken = (1 if values[step.key] == "yes" else -1), self._taken(step.chosen[-1].takes)
                peak, copied = peak - sign * taken, copied + sign * 2 * taken
        peak -= _of_batch(phases) * (shape.batch_size - micro_batch) // shape.batch_size
        return Tried(values, peak, near.prediction.flops, max(0, copied), micro_batch, simulated=False)

    def _taken(self, takes: Mapping[str, float]) -> int:
        """Bytes that a technique takes off the card, by what it declares."""
        peaks = [phase for one in self.planner.own for phase in one.prediction.phases.values()]
        return sum(int(share * max(phase.causes[cause] for phase in peaks)) for cause, share in takes.items())

    def _nearest(self, values: dict[Key, Any]) -> Candidate:
        """Equal first of all in what estimates cannot bridge."""
        return max(self.planner.own, key=lambda one: [one.values.get(key) == values.get(key) for key in COUNTS])


def _of_batch(phases: dict[str, PhasePeak]) -> int:
    """Bytes of the highest phase of training that grow with the batch."""
    worst = max(_of_steps(phases).values(), key=_total)
    return worst.causes["activations"] + worst.causes["temporary"]


def _of_steps(phases: dict[str, PhasePeak]) -> dict[str, PhasePeak]:
    """Without those of encoding ahead."""
    return {name: phase for name, phase in phases.items() if name not in CACHING}


def _total(phase: PhasePeak) -> int:
    return phase.total
