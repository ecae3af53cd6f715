"""The caching allocator's model: sizes, splitting, growing, giving back; real cards' traces are bench_allocator's business."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.engine.allocator import MIB, ROUNDING, Block, CachingAllocator, OutOfReserve, Pool

KIB = 1024


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [(1, 2), (1 * MIB, 2), (1 * MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (21 * MIB, 22)],
)
def test_segments_are_of_the_drivers_sizes(asked, reserved):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == reserved * MIB


def test_the_rest_of_a_small_block_serves_the_next_request():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved == 2 * MIB
    assert allocator.segments == 1


def test_a_large_block_is_not_split_for_less_than_a_mebibyte():
    """19.5 of 20 MiB: the half is lost until the block comes back."""
    allocator = CachingAllocator()
    block = allocator.allocate(9 * MIB)
    other = allocator.allocate(10 * MIB + 512 * KIB)
    assert other.size == 11 * MIB
    allocator.release(other)
    allocator.release(block)
    assert allocator.allocated == 0


def test_at_the_limit_what_is_cached_goes_first():
    allocator = CachingAllocator(limit=30 * MIB)
    allocator.release(allocator.allocate(22 * MIB))
    allocator.allocate(24 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved == 24 * MIB
    with pytest.raises(OutOfReserve) as caught:
        allocator.allocate(8 * MIB)
    assert caught.value.wanted == 20 * MIB


def test_an_expandable_segment_grows_where_a_fixed_one_would_be_lost():
    """Growing activations: fixed segments are each too small for the next request."""
    fixed, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (fixed, expandable):
        for size in (30, 40, 50, 60):
            allocator.release(allocator.allocate(size * MIB))
    assert fixed.reserved == 180 * MIB
    assert expandable.reserved == 60 * MIB


def test_pages_that_hold_nothing_are_given_back():
    allocator = CachingAllocator(expandable=True)
    low, high = allocator.allocate(50 * MIB), allocator.allocate(45 * MIB)
    allocator.release(low)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB  # two whole pages of 20 MiB were free, half of the third
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.release(high)


Steps = st.lists(st.tuples(st.integers(1, 40 * MIB) | st.integers(1, 4 * KIB), st.booleans()), max_size=120)


@settings(max_examples=60, deadline=None)
@given(Steps, st.booleans(), st.integers(0, 2**32))
def test_nothing_overlaps_and_nothing_is_lost(steps, expandable, seed):
    allocator, live, rng = CachingAllocator(expandable=expandable), [], random.Random(seed)
    for nbytes, frees in steps:
        live.append(allocator.allocate(nbytes))
        assert live[-1].size >= nbytes
        if frees:
            allocator.release(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.05:
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size) for block in [*live, *_free(allocator)])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert sum(end - start for start, end in spans) == allocator.reserved
        assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    for block in live:
        allocator.release(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0


def _free(allocator: CachingAllocator) -> list[Block]:
    pools: tuple[Pool, Pool] = (allocator.small, allocator.large)
    assert all(size % ROUNDING == 0 for pool in pools for size, *_ in pool.blocks)
    return [block for pool in pools for *_, block in pool.blocks]
