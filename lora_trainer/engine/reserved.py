"""From lives of tensors to what a card reserves for them: the tracker's record, played to the allocator's model.

cuBLAS takes a workspace from the same allocator for each thread that multiplies (the forward pass's and autograd's own), at its
first product, and keeps it. With a `limit`, cached segments are given back there as on a card; what then still does not fit is
out of memory, in the phase that is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .allocator import MIB, Block, CachingAllocator, OutOfReserve
from .tracker import Life, MemoryTracker

WORKSPACE = {9: 32 * MIB}
"""cuBLAS's bytes for a thread and stream, by the capability's first number (ATen/cuda/CublasHandlePool.cpp)."""
USUAL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
THREADS = (("forward", "text_cache", "latent_cache", "preview"), ("backward",))
"""Phases in whose first one a thread multiplies for the first time."""


@dataclass(frozen=True)
class Reserved:
    """Bytes reserved at the highest, of the whole record and of each phase. `short`: the phase that ran out of memory."""

    peak: int
    phases: Mapping[str, int]
    retries: int
    short: str = ""


def workspace_bytes(capability: tuple[int, int]) -> int:
    return WORKSPACE.get(capability[0], USUAL_WORKSPACE)


def reserved(
    tracker: MemoryTracker, capability: tuple[int, int], *, limit: int | None = None, expandable: bool = True
) -> Reserved:
    """What a card of this capability reserves for the recorded tensors, one after the other as they came and went."""
    allocator = CachingAllocator(limit, expandable=expandable)
    phases: dict[str, int] = {}
    blocks: dict[int, Block] = {}
    spans, place = tracker.spans(), 0
    waiting = [set(names) for names in THREADS]
    for moment, life in _events(tracker.lives()):
        while place + 1 < len(spans) and spans[place + 1].start < moment:
            place += 1
        phase = spans[place].name if spans else ""
        try:
            for names in [names for names in waiting if phase in names]:
                waiting.remove(names)
                allocator.allocate(workspace_bytes(capability))
            if moment == life.birth:
                blocks[life.birth] = allocator.allocate(life.size)
            else:
                allocator.release(blocks.pop(life.birth))
        except OutOfReserve:
            return Reserved(allocator.peak, phases, allocator.retries, short=phase)
        phases[phase] = max(phases.get(phase, 0), allocator.reserved)
    return Reserved(allocator.peak, phases, allocator.retries)


def _events(lives: Sequence[Life]) -> list[tuple[int, Life]]:
    """Births and deaths of device memory in their order; each moment of the tracker's clock has one."""
    device = [life for life in lives if not life.host]
    births = [(life.birth, life) for life in device]
    deaths = [(life.death, life) for life in device if life.death is not None]
    return sorted([*births, *deaths], key=lambda event: event[0])
