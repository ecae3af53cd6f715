"""Attention in chunks of queries, where no fused kernel can serve (engine/attention.py). It has no option: the VAE's is
sliced where the card needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..seam.technique import WrapTechnique

if TYPE_CHECKING:
    from torch import nn

    from ..seam.family import BlockGroup


@dataclass(frozen=True)
class AttentionSlicing(WrapTechnique):
    order: ClassVar[int] = 10

    score_bytes: int = 1 << 26
    """Scores that may stand in memory at once."""

    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        from ..engine.attention import slice_attention

        for group in groups:
            for block in group.blocks:
                slice_attention(block, score_bytes=self.score_bytes)


TECHNIQUE = AttentionSlicing
