"""Attention text by text equals attention under a full mask; windows and caps too; nothing (L, L) is held."""

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.families.causal_lm import attention
from lora_trainer.families.causal_lm.attention import Texts, Window, attend, texts_of

HEADS, GROUPS, WIDTH = 4, 2, 8


def _states(rows: int, length: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _reference(states: list[Tensor], texts: Texts, window: int | None, softcap: float | None) -> Tensor:
    query, key, value = states
    length = query.shape[2]
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    number = torch.stack([torch.repeat_interleave(torch.arange(len(r)), torch.tensor(r)) for r in texts.rows])
    at = torch.arange(length)
    seen = (at[:, None] >= at) & (number[:, :, None] == number[:, None, :])
    if window is not None:
        seen = seen & (at[:, None] - at < window)
    scores = query @ key.transpose(2, 3) * WIDTH**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("rows", [((20,), (20,)), ((5, 12, 3), (20,)), ((1, 19), (9, 11))])
@pytest.mark.parametrize("window", [None, 4, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_equals_attention_under_a_mask(
    rows: tuple[tuple[int, ...], ...], window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WINDOW_BAND", 3)
    monkeypatch.setattr(attention, "BAND_BYTES", 4 * 2 * HEADS * 20 * 6)
    states, texts = _states(2, 20), Texts(rows)
    mask = Window(window) if window else None
    out, _ = attend(nn.Module(), *states, mask, texts=texts, softcap=softcap)
    expected = _reference(states, texts, window, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for own, other in zip(
        torch.autograd.grad(out, states, direction), torch.autograd.grad(expected, states, direction), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_texts_are_runs_of_equal_numbers_and_padding_joins_the_last() -> None:
    ids = torch.tensor([[1, 1, 2, 2, 2, 0], [4, 4, 4, 4, 4, 4], [1, 2, 1, 1, 0, 0]])
    assert texts_of(ids, ids.shape).rows == ((2, 4), (6,), (1, 1, 4))
    assert texts_of(None, ids.shape).rows == ((6,),) * 3


def test_without_the_texts_nothing_runs() -> None:
    """A model that loses `texts` on its way down would mix packed texts without a word."""
    with pytest.raises(TypeError, match="texts"):
        attend(nn.Module(), *_states(1, 4), None)  # type: ignore[call-arg]


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (64, None), (None, 5.0)])
def test_memory_grows_with_the_length_not_its_square(window: int | None, softcap: float | None) -> None:
    """4,096 tokens: scores of one head are 64 MiB in float32, of four 256."""
    states = _states(1, 4096)
    mask = Window(window) if window else None
    with MemoryTracker() as tracker:
        out, _ = attend(nn.Module(), *states, mask, texts=Texts(((4096,),)), softcap=softcap)
        out.sum().backward()
    assert tracker.peak < (200 << 20 if softcap else 32 << 20)
