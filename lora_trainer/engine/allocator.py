"""PyTorch's CUDA caching allocator: what is *reserved* while tensors come and go, not only what they hold.

A request is rounded to 512 bytes and served from the smallest cached block that will do, in one pool up to 1 MiB and another
above; what is left of a block is kept as a free one where it is worth it, and free neighbours become one again. Where no block
will do, the driver is asked for a segment: 2 MiB for small requests, 20 MiB below 10 MiB, else the request in whole 2 MiB.
With expandable segments there is one range of addresses a pool, to whose end pages are mapped. At the limit, cached segments
(or pages) that hold nothing are given back and the request is tried again; only then is it out of memory.

As c10/cuda/CUDACachingAllocator.cpp does it (torch 2.6 to 2.13), for one stream. Replays of real cards' traces are equal to the
byte (tests/bench/bench_allocator.py). Left out: several streams, CUDA graphs, max_split_size, garbage collection by age.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

MIB = 2**20
ROUNDING = 512
SMALL = MIB
"""The largest request that the small pool serves."""
SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT, SEGMENT_ROUNDING = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
RANGE = 1 << 38
"""Addresses of an expandable segment: more than any card has."""


def rounded(nbytes: int) -> int:
    return max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)


class OutOfReserve(MemoryError):
    """Not even giving back all that is cached made room for a segment of `wanted` bytes."""

    def __init__(self, wanted: int, reserved: int, limit: int) -> None:
        super().__init__(f"{wanted} bytes beside {reserved} of {limit}")
        self.wanted, self.reserved, self.limit = wanted, reserved, limit


@dataclass(eq=False)
class Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    address: int
    size: int
    pool: "Pool"
    free: bool = False
    mapped: bool = True
    """False for addresses of an expandable segment without memory behind them."""
    before: "Block | None" = None
    after: "Block | None" = None

    def split(self, size: int) -> "Block":
        """Keep the first `size` bytes; the rest, as a block of its own that is in no list yet."""
        rest = Block(self.address + size, self.size - size, self.pool, mapped=self.mapped, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    @property
    def whole(self) -> bool:
        """A segment in one piece."""
        return self.before is None and self.after is None


Entry = tuple[int, int, Block]


@dataclass(eq=False)
class Pool:
    """Free blocks, smallest first, then by address; and what is not mapped of its expandable range."""

    small: bool
    blocks: list[Entry] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)
    start: int = 0
    """Where the expandable range begins; pages are counted from there."""

    @property
    def page(self) -> int:
        """Bytes by which an expandable segment grows."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def insert(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.blocks, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.blocks[bisect.bisect_left(self.blocks, (block.size, block.address))]
        block.free = False

    def segment_for(self, size: int) -> int:
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class CachingAllocator:
    """`limit`: bytes that may be reserved (a card, or a process's fraction of one).

    `address` chooses where a segment of so many bytes lies, which breaks ties between blocks of equal size; by default one
    after the other.
    """

    def __init__(
        self, limit: int | None = None, *, expandable: bool = False, address: Callable[[int], int] | None = None
    ) -> None:
        self.limit, self.expandable = limit, expandable
        self.small, self.large = Pool(True), Pool(False)
        self.reserved = self.peak = 0
        self.allocated = self.allocated_peak = 0
        self.segments = 0
        """Asked of the driver so far; pages, where they expand."""
        self.retries = 0
        """Requests that went through only after cached memory was given back."""
        self._address, self._next = address or self._after_the_last, 1 << 40

    def _after_the_last(self, size: int) -> int:
        self._next += 1 << 40
        return self._next

    def allocate(self, nbytes: int) -> Block:
        """Raises OutOfReserve at the limit."""
        size = rounded(nbytes)
        pool = self.small if size <= SMALL else self.large
        block = self._cached(pool, size) or self._new(pool, size)
        rest = block.size - size
        if rest >= ROUNDING if pool.small or self.expandable else rest > SMALL:
            pool.insert(block.split(size))
        self.allocated += block.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Back to its pool, one with its free neighbours."""
        self.allocated -= block.size
        block.pool.insert(self._merged(block))

    def empty_cache(self) -> None:
        """Give back all that holds nothing: whole segments, or whole pages of an expandable one."""
        for pool in (self.small, self.large):
            for *_, block in list(pool.blocks):
                if self.expandable:
                    self._unmap(block)
                elif block.whole:
                    pool.remove(block)
                    self.reserved -= block.size

    # -- finding

    def _cached(self, pool: Pool, size: int) -> Block | None:
        at = bisect.bisect_left(pool.blocks, (size,))
        if at == len(pool.blocks):
            return None
        if self.expandable:  # a block that can grow counts as what it can grow to
            while at + 1 < len(pool.blocks) and _grown(pool.blocks[at + 1][2]) < _grown(pool.blocks[at][2]):
                at += 1
        block = pool.blocks[at][2]
        pool.remove(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block:
        segment = pool.segment_for(size)
        if not self._room(segment):
            self.empty_cache()
            self.retries += 1
            if not self._room(segment):
                assert self.limit is not None
                raise OutOfReserve(segment, self.reserved, self.limit)
        if self.expandable:
            return self._expand(pool, size)
        self.segments += 1
        self._reserve(segment)
        return Block(self._address(segment), segment, pool)

    def _room(self, nbytes: int) -> bool:
        return self.limit is None or self.reserved + nbytes <= self.limit

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)

    def _merged(self, block: Block) -> Block:
        for near in (block.before, block.after):
            if near is not None and near.free and near.mapped == block.mapped:
                near.pool.remove(near)
                low, high = (near, block) if near is block.before else (block, near)
                block = _joined(low, high)
        return block

    # -- expandable segments

    def _expand(self, pool: Pool, size: int) -> Block:
        """Map pages to the free end of the pool's range (or to a hole in it) until a block of `size` bytes is there."""
        candidate = self._expandable(pool, size)
        if not candidate.mapped:
            candidate = self._map(candidate, min(candidate.size, size))
        while candidate.size < size:
            following = candidate.after
            assert following is not None
            candidate = self._map(following, min(size - candidate.size, following.size))
        pool.remove(candidate)
        return candidate

    def _expandable(self, pool: Pool, size: int) -> Block:
        """The lowest addresses without memory behind them, or a free block right before them, with room for `size` bytes."""
        for block in sorted(pool.unmapped, key=lambda block: block.address):
            start = block.before if block.before is not None and block.before.free else block
            if _address_space(start) >= size:
                return start
        pool.start = self._address(RANGE)
        block = Block(pool.start, RANGE, pool, mapped=False)
        pool.unmapped.append(block)
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Put pages behind the first `size` bytes of unmapped addresses; the free block that they are then part of."""
        pool = block.pool
        pool.unmapped.remove(block)
        pages = -(-size // pool.page)
        if pages * pool.page < block.size:
            pool.unmapped.append(block.split(pages * pool.page))
        block.mapped = True
        self.segments += pages
        self._reserve(block.size)
        block = self._merged(block)
        pool.insert(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Take away the pages that lie whole within a free block."""
        pool, end = block.pool, block.address + block.size
        first = pool.start - (pool.start - block.address) // pool.page * pool.page
        last = pool.start + (end - pool.start) // pool.page * pool.page
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            inner = block.split(first - block.address)
            pool.insert(block)
            block = inner
        if last < end:
            pool.insert(block.split(last - first))
        self.reserved -= block.size
        block.mapped = False
        for near in (block.before, block.after):
            if near is not None and not near.mapped:
                pool.unmapped.remove(near)
                low, high = (near, block) if near is block.before else (block, near)
                block = _joined(low, high)
        pool.unmapped.append(block)


def _joined(low: Block, high: Block) -> Block:
    low.size, low.after = low.size + high.size, high.after
    if high.after is not None:
        high.after.before = low
    return low


def _grown(block: Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _address_space(block: Block | None) -> int:
    """Bytes from here to the next block in use."""
    total = 0
    while block is not None and (block.free or not block.mapped):
        total, block = total + block.size, block.after
    return total
