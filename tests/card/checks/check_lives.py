"""Random lives of tensors, on two streams, with cache emptied now and then: the allocator's books stay right. In both modes."""

import random

import pytest
import torch

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("empty_card")


def books_are_right():
    """Pieces of a segment lie one after the other, free neighbours are one, and the sums are the statistics."""
    stats, segments = torch.cuda.memory_stats(), torch.cuda.memory_snapshot()
    states = {"active_allocated": 0, "inactive": 0, "active_pending_free": 0}
    for segment in segments:
        end, before = None, None
        for block in segment["blocks"]:
            if end == block["address"]:
                assert (before, block["state"]) != ("inactive", "inactive")
            else:
                assert end is None or segment["is_expandable"]  # a hole, not mapped
            end, before = block["address"] + block["size"], block["state"]
            states[block["state"]] += block["size"]
    assert states["active_allocated"] == stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    assert sum(states.values()) == stats["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
    pools = ("small_pool", "large_pool")
    assert sum(stats[f"active_bytes.{pool}.current"] for pool in pools) == stats["active_bytes.all.current"]


@pytest.mark.parametrize("seed", range(3))
def test_books_stay_right(seed):
    draw, live, side = random.Random(seed), [], torch.cuda.Stream()
    torch.cuda.set_per_process_memory_fraction(64 * MIB / torch.cuda.mem_get_info()[1])
    shortages = 0
    for step in range(400):
        if live and draw.random() < 0.48:
            live.pop(draw.randrange(len(live)))
        else:
            try:
                with torch.cuda.stream(side if draw.random() < 0.3 else torch.cuda.current_stream()):
                    live.append(torch.empty(int(2 ** draw.uniform(0, 25)), dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                shortages += 1
                live = live[: len(live) // 2]
        if draw.random() < 0.03:
            torch.cuda.empty_cache()
        if step % 20 == 0:
            books_are_right()
    assert shortages
    live.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    books_are_right()
    assert torch.cuda.memory_reserved() == 0
