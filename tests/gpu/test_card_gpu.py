"""On a real card: what is read of it, and that the cap turns too much into an error we can handle."""

import pytest
import torch

from lora_trainer.config.schema import MemoryConfig
from lora_trainer.machine.cap import cap_process
from lora_trainer.machine.card import read_cards
from lora_trainer.machine.hardware import Machine
from lora_trainer.planner.picker import pick
from lora_trainer.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]


def test_cards_are_read() -> None:
    for index, card in enumerate(read_cards(torch.cuda.device_count())):
        assert card.index == index
        assert 0 < card.free <= card.total
        assert card.total == pytest.approx(torch.cuda.get_device_properties(index).total_memory, rel=0.02)


def test_the_context_allowance_is_about_right() -> None:
    """What nvidia-smi counts for this process beyond the allocator's reserve; NVML must answer."""
    pynvml = pytest.importorskip("pynvml")
    machine = Machine.read()
    choice = pick(MemoryConfig(), "auto", machine)
    assert choice.card is not None
    torch.zeros(8, 8, device=choice.device) @ torch.zeros(8, 8, device=choice.device)
    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(choice.device).uuid
    used = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")).used)
    others = sum(holder.bytes or 0 for holder in choice.card.holders or ())
    context = used - others - torch.cuda.memory_reserved(choice.device)
    print(f"context {context / 2**20:.0f} MiB, allowance {choice.allowance.context / 2**20:.0f} MiB")
    assert context < choice.allowance.context + GIB // 4


def test_the_cap_raises_out_of_memory() -> None:
    choice = pick(MemoryConfig(vram=2), "auto", Machine.read())
    assert choice.cap is not None
    try:
        cap_process(choice.device, choice.cap)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=choice.device)
        torch.empty(GIB // 2, dtype=torch.uint8, device=choice.device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, choice.device)
        torch.cuda.empty_cache()
