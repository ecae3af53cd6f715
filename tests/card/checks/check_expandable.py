"""Expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True): one range of addresses, mapped in units."""

import os

import pytest
import torch

MIB = 1 << 20
pytestmark = [
    pytest.mark.usefixtures("empty_card"),
    pytest.mark.skipif("PYTORCH_ALLOC_CONF" not in os.environ, reason="PYTORCH_ALLOC_CONF is not set"),
]


def tensor(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


def test_units_are_mapped_as_needed():
    kept = [tensor(30)]
    assert torch.cuda.memory_reserved() == 40 * MIB
    kept.append(tensor(30))
    assert torch.cuda.memory_reserved() == 60 * MIB
    kept.append(tensor(0.5))
    assert torch.cuda.memory_reserved() == 62 * MIB
    (segment,) = [one for one in torch.cuda.memory_snapshot() if one["segment_type"] == "large"]
    assert segment["is_expandable"]
    assert segment["total_size"] == 60 * MIB


def test_freed_pieces_serve_a_larger_one():
    kept = [tensor(30), tensor(30)]
    kept.clear()
    kept.append(tensor(60))
    assert torch.cuda.max_memory_reserved() == 60 * MIB


def test_a_free_end_grows():
    kept = [tensor(30), tensor(30)]
    kept.pop()
    kept.append(tensor(50))
    assert torch.cuda.memory_reserved() == 80 * MIB


def test_empty_cache_gives_back_whole_units():
    kept = [tensor(30), tensor(30)]
    kept.pop(0)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 40 * MIB  # the first unit; half of the second is in use
    kept.append(tensor(20))
    assert torch.cuda.memory_reserved() == 60 * MIB


def test_at_the_limit_units_are_given_back():
    torch.cuda.set_per_process_memory_fraction(100 * MIB / torch.cuda.mem_get_info()[1])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kept = tensor(60)
    del kept
    kept = tensor(70)
    assert torch.cuda.memory_stats()["num_alloc_retries"] >= 1
    assert torch.cuda.memory_reserved() == 80 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        tensor(40)
    del kept
