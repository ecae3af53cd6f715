"""The next tighter way to compute a window that changes no number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.names import Key
from .options import CHECKPOINTING, EMBEDDINGS, OFFLOAD, OPTIMIZER_OFFLOAD, STREAMING

MICRO_BATCH: Key = ("training", "micro_batch")
"""No option, but fixed where a window cannot be split."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the base's blocks."""


@dataclass(frozen=True)
class Rung:
    """How a window is computed: the options in force, and the most examples at once."""

    values: Mapping[Key, Any]
    micro_batch: int


def next_rung(rung: Rung, fixed: frozenset[Key] = frozenset(), phase: str = "train") -> Rung | None:
    """The next tighter one; None below the last. `fixed`: options that are not ours to change.

    What keeps fewer activations helps only where there is a backward pass; loading, the optimizer's update and saving want
    fewer weights on the card. Options that mean nothing to a run (a base without a vocabulary, an optimizer that cannot be
    taken apart) are not among a plan's values.
    """
    values, size, learns = rung.values, rung.micro_batch, phase == "train"
    if size > 1 and MICRO_BATCH not in fixed and (learns or phase == "validation"):
        return Rung(values, -(-size // 2))
    recomputed = values.get(CHECKPOINTING) != "no"
    if learns and not recomputed and CHECKPOINTING not in fixed:
        return Rung({**values, CHECKPOINTING: "yes"}, size)
    if EMBEDDINGS not in fixed and values.get(EMBEDDINGS) == "no":
        return Rung({**values, EMBEDDINGS: "yes"}, size)
    if not recomputed and CHECKPOINTING in fixed:
        return _moments_away(rung, fixed)  # all that is between needs it
    if learns and OFFLOAD not in fixed and values.get(OFFLOAD) != "yes":
        return Rung({**values, OFFLOAD: "yes"}, size)
    share = values.get(STREAMING)
    now = float(share) if isinstance(share, (int, float)) else 0.0
    more = next((step for step in SHARES if step > now), None)
    if STREAMING in fixed or more is None:
        return _moments_away(rung, fixed)
    return Rung({**values, CHECKPOINTING: "yes", STREAMING: more}, size)


def _moments_away(rung: Rung, fixed: frozenset[Key]) -> Rung | None:
    """Last, because these copies are not hidden behind computing."""
    if OPTIMIZER_OFFLOAD in fixed or rung.values.get(OPTIMIZER_OFFLOAD) != "no":
        return None
    return Rung({**rung.values, OPTIMIZER_OFFLOAD: "yes"}, rung.micro_batch)
