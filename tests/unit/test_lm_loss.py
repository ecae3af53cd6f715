"""The lean loss is plain cross-entropy on full logits: value, gradients, and what it never holds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_trainer.engine.packed import PackedLinear, RowScaled
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.families.causal_lm import loss as _lm_loss
from lora_trainer.families.causal_lm.loss import Head, find_targets, sum_of_losses

VOCABULARY, WIDTH = 200, 24


def _case(rows: int = 3, length: int = 17, *, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(False)
    nn.init.normal_(head.weight)
    hidden = torch.randn(rows, length, WIDTH, requires_grad=True)
    labels = torch.randint(VOCABULARY, (rows, length))
    labels[torch.rand(rows, length) < 0.4] = -100
    return head, hidden, labels, torch.tensor([1.0, 0.5, 2.0][:rows])


def _plain(head: Head, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    logits = head.module(hidden[:, :-1]).float() * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100)
    return (losses * weight[:, None]).sum()


@pytest.fixture(params=["whole", "chunks", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chunks":
        monkeypatch.setattr(_lm_loss, "chunk_size", lambda vocabulary: 7)
    if request.param == "tiles":
        monkeypatch.setattr(_lm_loss, "TILE_ROWS", 64)
        monkeypatch.setattr(_lm_loss, "TILED_TOKENS", 13)
        monkeypatch.setattr(_lm_loss, "chunk_size", lambda vocabulary: 5)
    return str(request.param)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (0.5, 3.0)])
def test_equals_cross_entropy_on_full_logits(way: str, bias: bool, scale: float, softcap: float | None) -> None:
    module, hidden, labels, weight = _case(bias=bias)
    if way == "tiles":
        module.home = torch.device("cpu")
    head = Head(module, scale, softcap)
    expected = _plain(head, hidden, labels, weight)
    (gradient,) = torch.autograd.grad(expected / 10, hidden)
    loss = sum_of_losses(head, hidden, find_targets(labels, weight))
    (own,) = torch.autograd.grad(loss / 10, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(own, gradient, rtol=1e-5, atol=1e-6)


def test_a_trained_head_gets_its_gradient_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module, hidden, labels, weight = _case(bias=True)
    module.requires_grad_(True)
    monkeypatch.setattr(_lm_loss, "chunk_size", lambda vocabulary: 7)
    inputs = [hidden, module.weight, module.bias]
    expected = torch.autograd.grad(_plain(Head(module, 0.5, 4.0), hidden, labels, weight), inputs)
    loss = sum_of_losses(Head(module, 0.5, 4.0), hidden, find_targets(labels, weight))
    for own, other in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_no_label_is_no_loss_and_a_zero_gradient() -> None:
    module, hidden, labels, weight = _case()
    loss = sum_of_losses(Head(module), hidden, find_targets(torch.full_like(labels, -100), weight))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_counts_what_predecessors_predict() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])
    assert _lm_loss.count_targets(labels) == 2  # 5 and 8 have no predecessor
    assert find_targets(labels, torch.ones(2)).places.tolist() == [0, 2]


def test_evaluation_makes_no_gradient_buffer() -> None:
    module, hidden, labels, weight = _case()
    with torch.no_grad():
        loss = sum_of_losses(Head(module), hidden, find_targets(labels, weight))
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _plain(Head(module), hidden, labels, weight))


@pytest.mark.parametrize("away", [False, True])
def test_never_holds_all_logits(away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 tokens × 4,096 words are 32 MB of float32 logits; the loss holds a fraction, and the gradient it is for."""
    monkeypatch.setattr(_lm_loss, "CHUNK_BYTES", 1 << 21)
    monkeypatch.setattr(_lm_loss, "TILE_ROWS", 512)
    module = nn.Linear(16, 4096, bias=False).requires_grad_(False)
    if away:
        module.home = torch.device("cpu")
    hidden = torch.randn(1, 2000, 16, requires_grad=True)
    targets = find_targets(torch.randint(4096, (1, 2000)), torch.ones(1))
    with MemoryTracker() as tracker:
        sum_of_losses(Head(module), hidden, targets).backward()
    assert tracker.peak < 8e6


def test_a_packed_head_is_unpacked_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lm_loss, "TILE_ROWS", 64)
    with torch.device("meta"):
        layer = nn.Linear(WIDTH, VOCABULARY, bias=False)
    packed = PackedLinear.of(layer, RowScaled(torch.int8, (nn.Linear,)))
    module, hidden, labels, weight = _case()
    packed.pack_weight(module.weight, torch.device("cpu"))
    module.weight.copy_(packed.unpacked())
    expected = _plain(Head(module), hidden, labels, weight)
    (gradient,) = torch.autograd.grad(expected, hidden)
    monkeypatch.setattr(PackedLinear, "unpacked", None)
    loss = sum_of_losses(Head(packed), hidden, find_targets(labels, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], gradient, rtol=1e-5, atol=1e-5)


def test_a_second_backward_pass_is_refused() -> None:
    module, hidden, labels, weight = _case()
    loss = sum_of_losses(Head(module), hidden, find_targets(labels, weight))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sixteen_bits_stay_close() -> None:
    module, hidden, labels, weight = _case()
    reference = _plain(Head(module), hidden, labels, weight)
    low = hidden.detach().bfloat16().requires_grad_()
    loss = sum_of_losses(Head(module.bfloat16()), low, find_targets(labels, weight))
    loss.backward()
    assert low.grad is not None
    assert low.grad.dtype is torch.bfloat16
    torch.testing.assert_close(loss, reference, rtol=1e-2, atol=0)
