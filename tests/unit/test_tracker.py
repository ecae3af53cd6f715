"""What the tracker counts where, and when what it counts changes sides."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.engine.tracker import MemoryTracker, host_memory, mark_resident

SIZE = 1 << 20


def test_marked_host_memory_counts_as_device_memory_from_then_on():
    with MemoryTracker() as tracker:
        tracker.enter_phase("read")
        with host_memory():
            weight = torch.empty(SIZE, dtype=torch.uint8)
        assert (tracker.now, tracker.host_now) == (0, SIZE)
        tracker.enter_phase("kept")
        tracker.mark([weight], "frozen")
        assert (tracker.now, tracker.host_now) == (SIZE, 0)
        tracker.enter_phase("gone")
        del weight
        assert (tracker.now, tracker.host_now) == (0, 0)
    peaks = tracker.peaks()
    assert (peaks["read"].total, peaks["read"].host) == (0, SIZE)
    assert peaks["kept"].total == peaks["kept"].causes["frozen"] == SIZE


def test_marking_again_changes_the_cause_alone():
    with MemoryTracker() as tracker:
        tracker.enter_phase("step")
        tensor = torch.empty(SIZE, dtype=torch.uint8)
        tracker.mark([tensor, tensor.view(torch.int8)], "gradients")
        tracker.mark([tensor], "optimizer")
        assert tracker.now == tracker.peak == SIZE
    assert tracker.peaks()["step"].causes["optimizer"] == SIZE


def test_marking_over_the_limit_is_out_of_memory():
    with MemoryTracker(limit=SIZE - 1, record=False) as tracker:
        with host_memory():
            weight = torch.empty(SIZE, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            tracker.mark([weight], "frozen")


def test_beside_a_card_what_is_on_the_cpu_is_host_memory():
    card = torch.device("cuda")
    with FakeTensorMode(), MemoryTracker(device=card) as tracker:
        here, there = torch.empty(SIZE, dtype=torch.uint8), torch.empty(2 * SIZE, dtype=torch.uint8, device="meta")
        tracker.mark([here], "optimizer")  # AdamW keeps its step counts on the CPU
        assert (tracker.now, tracker.host_now) == (2 * SIZE, SIZE)
        assert there.is_meta


def test_layers_with_a_home_are_not_resident():
    model = nn.ModuleDict({"here": nn.Linear(512, 512), "away": nn.Linear(512, 512), "lora": nn.Linear(512, 8)})
    model.requires_grad_(False)
    model["lora"].weight.requires_grad_(True)
    model["away"].home = torch.device("cpu")
    with MemoryTracker() as tracker:
        tracker.enter_phase("load")
        mark_resident(model, tracker)
        causes = tracker.peaks()["load"].causes
    assert causes["frozen"] == 4 * (512 * 512 + 512) + 512  # the bias of 8 is rounded up
    assert causes["adapter"] == 4 * 512 * 8
