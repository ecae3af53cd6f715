"""The allocator's model against what real cards' allocators did: python tests/bench/bench_allocator.py FOLDER…

Each folder holds traces of `torch.cuda.memory` snapshots as JSON (`*.json.gz`): `segments` and `live` before the first event,
then `events` in order: "a" allocation, "f" free, "s" a new segment, "r" a segment given back, each with address and bytes. The
model is given the same requests, and the addresses that the driver chose; reserved peak and number of segments are compared.
"""

import bisect
import collections
import gzip
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from lora_trainer.engine.allocator import MIB, SMALL, SMALL_SEGMENT, Block, CachingAllocator  # noqa: E402


@dataclass(frozen=True)
class Replayed:
    """Bytes, but for `segments`; of the card, and of the model given the same requests."""

    name: str
    allocated: int
    card: int
    model: int
    card_segments: int
    model_segments: int

    @property
    def error(self) -> float:
        return abs(self.model / self.card - 1)


def replay(path: Path) -> Replayed:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    made = collections.deque((at, size) for kind, at, size in trace["events"] if kind == "s")
    beyond = [1 << 60]

    def address(size: int) -> int:
        if made and made[0][1] == size:
            return int(made.popleft()[0])
        beyond[0] += 1 << 40  # a segment that the card did not make
        return beyond[0]

    allocator = CachingAllocator(address=address)
    blocks = adopt(allocator, trace)
    reserved = peak = allocator.reserved
    for kind, at, size in trace["events"]:
        if kind == "s":
            reserved += size
            peak = max(peak, reserved)
        elif kind == "r":
            reserved -= size
            block = next(b for pool in (allocator.small, allocator.large) for *_, b in pool.blocks if b.address == at)
            assert block.size == size
            block.pool.remove(block)
            allocator.reserved -= size
        elif kind == "a":
            blocks[at] = allocator.allocate(size)
        else:
            allocator.release(blocks.pop(at))
    segments = sum(kind == "s" for kind, *_ in trace["events"])
    return Replayed(path.name, allocator.allocated_peak, peak, allocator.peak, segments, allocator.segments)


def adopt(allocator: CachingAllocator, trace: dict[str, Any]) -> dict[int, Block]:
    """Segments and live blocks that were there before the first event; the blocks by address."""
    live = dict(map(tuple, trace["live"]))
    addresses = sorted(live)
    blocks: dict[int, Block] = {}
    for start, size in trace["segments"]:
        inside = addresses[bisect.bisect_left(addresses, start) : bisect.bisect_left(addresses, start + size)]
        small = size == SMALL_SEGMENT and all(live[at] <= SMALL for at in inside)
        rest = Block(start, size, allocator.small if small else allocator.large)
        for at in inside:
            if at > rest.address:
                gap, rest = rest, rest.split(at - rest.address)
                gap.pool.insert(gap)
            blocks[at] = rest
            if rest.size > live[at]:
                rest = rest.split(live[at])
            allocator.allocated += live[at]
        if rest.address not in blocks:
            rest.pool.insert(rest)
        allocator.reserved += size
    allocator.peak, allocator.allocated_peak = allocator.reserved, allocator.allocated
    return blocks


def main() -> int:
    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).glob("*.json.gz"))]
    found = [replay(path) for path in paths]
    print(f"{'trace':34} {'tensors':>9} {'card':>9} {'model':>9} {'error':>8}  segments")
    for one in found:
        sizes = " ".join(f"{count / MIB:9.1f}" for count in (one.allocated, one.card, one.model))
        print(f"{one.name:34} {sizes} {100 * one.error:7.3f} %  {one.card_segments} / {one.model_segments}")
    worst = max((one.error for one in found), default=0.0)
    segments = max((abs(one.card_segments - one.model_segments) for one in found), default=0)
    print(f"worst error of the reserved peak: {100 * worst:.3f} %; of the number of segments: {segments}")
    return int(worst > 0 or segments > 0)


if __name__ == "__main__":
    sys.exit(main())
