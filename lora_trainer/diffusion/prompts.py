"""Prompt embeds of differing length: cached without their padding, put together again with a mask.

An encoder such as Qwen's masks its padding, so what stands there is noise, and it would be most of the cache: a caption of
30 tokens in 512. Families whose model was trained on unmasked padding (FLUX.1) cache it instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.host import is_fake
from ..seam.family import Batch, Example

MASK = "prompt_mask"
"""(B, L) bool, true where there is a token; only in batches whose prompts differ in length."""


def trimmed(embeds: Tensor, mask: Tensor) -> Tensor:
    """(L, D) and its mask (L,) -> the real tokens; the first, if there is none, since nothing cannot be attended to."""
    if is_fake(mask):  # the longest caption, for the plan
        return embeds
    kept = embeds[mask.bool()]
    return (kept if len(kept) else embeds[:1]).clone()


def trim(example: Example) -> Example:
    """Without its mask, and without the prompt embeds that it hides."""
    if MASK not in example:
        return example
    rest = {name: value for name, value in example.items() if name != MASK}
    return {**rest, "prompt_embeds": trimmed(example["prompt_embeds"], example[MASK])}


def collate(examples: Sequence[Example]) -> Batch:
    """Stack; where `prompt_embeds` (L, D) differ in length, padded with zeros to the longest, and a mask beside them."""
    lengths = [len(example["prompt_embeds"]) if "prompt_embeds" in example else 0 for example in examples]
    if len(set(lengths)) <= 1:
        return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    longest = max(lengths)
    padded = [{**example, "prompt_embeds": _padded(example["prompt_embeds"], longest)} for example in examples]
    places = torch.arange(longest, device=examples[0]["prompt_embeds"].device)
    return {**collate(padded), MASK: torch.stack([places < length for length in lengths])}


def _padded(embeds: Tensor, length: int) -> Tensor:
    return torch.cat([embeds, embeds.new_zeros(length - len(embeds), *embeds.shape[1:])])
