"""Attention in chunks of queries, where no fused kernel can serve (engine/attention.py). It has no option: the VAE's is
sliced where the card needs it."""

from __future__ import annotations

from dataclasses import dataclass

from ..seam.technique import Blocks, Module, WrapTechnique


@dataclass(frozen=True)
class AttentionSlicing(WrapTechnique):
    order = 10

    score_bytes: int = 1 << 26
    """Scores that may stand in memory at once."""

    def wrap(self, model: Module, groups: Blocks) -> None:
        from ..engine.attention import slice_attention

        for group in groups:
            for block in group.blocks:
                slice_attention(block, score_bytes=self.score_bytes)


TECHNIQUE = AttentionSlicing
