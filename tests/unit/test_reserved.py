"""What a card reserves for a record of tensors: phases, workspaces, the limit."""

import pytest
import torch

from lora_trainer.engine.allocator import MIB
from lora_trainer.engine.reserved import USUAL_WORKSPACE, reserved, workspace_bytes
from lora_trainer.engine.tracker import MemoryTracker, host_memory

AMPERE, HOPPER = (8, 6), (9, 0)


def mebibytes(count):
    return torch.empty(count * MIB, dtype=torch.uint8)


def record(*phases):
    """(name, sizes in MiB kept to the phase's end) each."""
    with MemoryTracker() as tracker:
        for name, sizes in phases:
            tracker.enter_phase(name)
            kept = [mebibytes(size) for size in sizes]
            del kept
    return tracker


def test_a_workspace_is_kept_where_it_was_made():
    """The first one splits the cached segment, so the next 30 MiB want another; the second fits beside the first."""
    found = reserved(record(("load", [30]), ("forward", [30]), ("backward", [30])), AMPERE, expandable=False)
    assert found.phases == {"load": 30 * MIB, "forward": 60 * MIB, "backward": 60 * MIB}
    assert found.peak == 60 * MIB
    assert not found.short


def test_hoppers_workspace_is_larger():
    assert workspace_bytes(AMPERE) == USUAL_WORKSPACE == 8_519_680
    assert workspace_bytes(HOPPER) == 32 * MIB


def test_growing_tensors_lose_less_where_segments_expand():
    tracker = record(*(("forward", [size]) for size in (40, 60, 80, 100)))
    classic, expanding = (reserved(tracker, AMPERE, expandable=expandable).peak for expandable in (False, True))
    assert classic >= 280 * MIB
    assert expanding <= 140 * MIB


def test_at_the_limit_cached_segments_are_given_back():
    tracker = record(*(("forward", [size]) for size in (40, 60, 80, 100)))
    found = reserved(tracker, AMPERE, limit=130 * MIB, expandable=False)
    assert found.retries > 0
    assert found.peak <= 130 * MIB
    assert not found.short


def test_what_does_not_fit_is_short_in_its_phase():
    found = reserved(record(("load", [30]), ("forward", [90])), AMPERE, limit=100 * MIB)
    assert found.short == "forward"


@pytest.mark.parametrize("expandable", [False, True])
def test_host_memory_is_not_the_cards(expandable):
    with MemoryTracker() as tracker:
        tracker.enter_phase("load")
        with host_memory():
            kept = [mebibytes(50)]
        kept.append(mebibytes(10))
    assert reserved(tracker, AMPERE, expandable=expandable).peak <= 20 * MIB
