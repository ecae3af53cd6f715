"""Prompts cached without padding come together with a mask, in training and in previews alike."""

import torch

from lora_trainer.data.batches import collate as collate_batch
from lora_trainer.diffusion.prompts import MASK, collate, trimmed
from lora_trainer.diffusion.transformer import TransformerFamily


def example(length: int) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": torch.full((length, 3), float(length)), "latents": torch.zeros(2)}


def test_padding_is_left_out_and_put_back():
    embeds, mask = torch.arange(12.0).view(4, 3), torch.tensor([1, 1, 0, 0])
    assert torch.equal(trimmed(embeds, mask), embeds[:2])
    assert trimmed(embeds, torch.zeros(4)).shape == (1, 3)
    batch = collate([example(2), example(4)])
    assert batch["prompt_embeds"].shape == (2, 4, 3)
    assert torch.equal(batch[MASK], torch.tensor([[True, True, False, False], [True] * 4]))
    assert not batch["prompt_embeds"][0, 2:].any()


def test_equal_lengths_need_no_mask():
    assert MASK not in collate([example(3), example(3)])


class Plain(TransformerFamily):
    """Abstract in all but collate."""


Plain.__abstractmethods__ = frozenset()


def test_the_loader_asks_the_family():
    family = TransformerFamily.__new__(Plain)
    assert collate_batch([example(2), example(5)], family)["prompt_embeds"].shape == (2, 5, 3)
    assert MASK not in collate_batch([example(5), example(5)], family)
