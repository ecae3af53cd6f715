"""What one simulation tells of other plans: exact for a share of streamed blocks, rough for the rest.

Streaming moves bytes off the card and puts a ring there, so a peak shifts by known amounts. Other rungs shift it by what
the simulation says of their causes. An estimate chooses what to simulate, or fills a line of a table that says so; no
plan rests on one.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from torch import nn

from ..config.declared import techniques
from ..engine.block_streaming import choose
from ..engine.packed import packing_report
from ..engine.streaming import frozen_bytes
from ..engine.tracker import PhasePeak
from ..engine.vocabulary import vocabulary_bytes
from ..seam.family import BlockGroup
from ..techniques.block_streaming import BlockStreaming


class Blocks:
    """Sizes of the base's blocks and vocabulary layers. The model is on meta, its adapters not yet in place."""

    def __init__(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        self._blocks = [block for group in groups for block in group.blocks]
        self.moved = cache(self._moved)
        self.packed = packing_report(groups)[0] > 0
        """Some layers keep their weight in few bits."""
        self.idle = {one.key for one in techniques() if one.some_bases and not one.finds(model, groups)}
        """Options that would change nothing for this base."""
        sizes = vocabulary_bytes(model, groups)
        self.vocabulary, self.head = sum(sizes), max(sizes, default=0)
        """Bytes that embedding offload takes off the card, and those that come back for the loss."""

    def _moved(self, share: float) -> tuple[int, int]:
        """(bytes in host memory, bytes of the ring) when `share` of the blocks is streamed."""
        sizes = [frozen_bytes(block) for block in choose(self._blocks, share)] if share else []
        slots = min(BlockStreaming.slots, len(sizes))
        return sum(sizes), sum(max(sizes[first::slots]) for first in range(slots))

    def off_card(self, share: float) -> int:
        """Bytes that streaming a share takes off the card."""
        moved, ring = self.moved(share)
        return moved - ring


def peak_at(peak: int, share: float, other: float, blocks: Blocks) -> int:
    """The peak with another share of streamed blocks."""
    return peak + blocks.off_card(share) - blocks.off_card(other)


def offload_saves(phases: dict[str, PhasePeak]) -> int:
    """About what keeping activations in host memory takes off the peak: half, since the two in use come back."""
    return max(phases[name].causes["activations"] for name in ("forward", "backward")) // 2


def with_examples(phases: Mapping[str, PhasePeak], share: float) -> int:
    """The peak at best, if a micro-batch held only this share of its examples."""
    shrunk = 1 - share
    return max(int(one.total - shrunk * (one.causes["activations"] + one.causes["temporary"])) for one in phases.values())
