"""Two cards (EMU_CARDS=2): memories of their own, the thread's current card, and work on the wrong one."""

import emucuda
import pytest
import torch
import torch.nn.functional as F

ONE = torch.device("cuda", 1)
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="EMU_CARDS is not 2")


@pytest.fixture(autouse=True)
def _first_card():
    yield
    emucuda.forbid()
    torch.cuda.set_device(0)


def test_both_are_there():
    assert torch.cuda.device_count() == 2
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.set_device(2)


def test_cuda_means_the_current_card():
    assert torch.ones(1, device="cuda").device.index == 0
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").device == ONE
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == 1
    assert torch.ones(1).cuda().device == ONE


def test_memories_are_separate():
    before = torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)
    x = torch.ones(1 << 20, device=ONE)
    assert torch.cuda.memory_allocated(0) == before[0]
    assert torch.cuda.memory_allocated(1) - before[1] == x.nbytes
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
        torch.empty(1 << 40, device=ONE)


def test_one_operator_on_both():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, 4, device="cuda:0") + torch.ones(4, 4, device=ONE)


def test_copies_between_them():
    x = torch.arange(100.0, device="cuda:0")
    y = x.to(ONE) * 2
    assert torch.equal(y.cpu(), x.cpu() * 2)


def test_training_on_the_second():
    layer, x = torch.nn.Linear(8, 8).to(ONE), torch.randn(2, 2, 8, 8, device=ONE, requires_grad=True)
    y = layer(x)
    F.scaled_dot_product_attention(y, y, y).square().mean().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert layer.weight.grad.device == x.grad.device == ONE


def test_streams_belong_to_their_card():
    side, x = torch.cuda.Stream(1), torch.ones(100, device=ONE)
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1
        with pytest.raises(RuntimeError, match="emucuda: race"):
            x.add_(1)
        emucuda.clear()
    assert torch.cuda.current_device() == 0
    side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize(1)


def test_a_stray_allocation_is_reported():
    x = torch.ones(4, device=ONE)
    emucuda.forbid(0)
    with pytest.raises(RuntimeError, match="wrong-card: an allocation on card 0"):
        torch.zeros(1, device="cuda")
    emucuda.clear()
    torch.cuda.set_device(1)
    assert (torch.zeros(1, device="cuda") + x).device == ONE


def test_page_locking_makes_a_context_on_the_current_card():
    host = torch.zeros(4096)
    emucuda.forbid(0)
    assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
    assert any(line.startswith("wrong-card: page-locking on card 0") for line in emucuda.reports())
    emucuda.clear()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def test_nvml_counts_both():
    pynvml = pytest.importorskip("pynvml")
    x = torch.ones(1 << 20, device=ONE)
    used = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used for index in range(2)]
    assert used[1] >= torch.cuda.memory_reserved(1) >= x.nbytes
    assert pynvml.nvmlDeviceGetCount() == 2


def test_the_program_reads_both_without_a_context_on_either():
    """NVML is asked first: PyTorch would make one."""
    pytest.importorskip("pynvml")
    from lora_trainer.machine.card import read_cards

    emucuda.set_card(others=1 << 30)
    try:
        cards = read_cards(2)
    finally:
        emucuda.set_card(others=0)
    assert [card.index for card in cards] == [0, 1]
    assert all(card.name == "Emulated card" and card.capability == (7, 5) for card in cards)
    assert all(card.free <= card.total - (1 << 30) for card in cards)
    assert all(holder.bytes == 1 << 30 for card in cards for holder in card.holders)
    assert not any(card.context_made for card in cards)
