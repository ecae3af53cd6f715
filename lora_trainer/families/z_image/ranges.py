"""Z-Image in fp16, whose largest number its attention and MLPs pass: both are computed at a fraction of their size.

What comes out of either goes through an RMS norm, which takes the size off again (ComfyUI's pull request 11187 and
musubi-tuner's 795 found so); with the norms' epsilon made as much smaller, the answer is exactly that of the unscaled network.
Powers of two, so nothing is rounded. bf16 needs none of it.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION, MLP = 2.0**-2, 2.0**-5


def keep_in_range(blocks: list[nn.Module]) -> None:
    """Of ZImageTransformerBlocks, before adapters are put on them."""
    block: Any
    for block in blocks:
        attention = block.attention
        attention.register_forward_pre_hook(_smaller)
        for norm in (attention.norm_q, attention.norm_k, block.attention_norm2):
            if norm is not None:
                norm.eps *= ATTENTION**2
        block.feed_forward._forward_silu_gating = _gated
        block.ffn_norm2.eps *= MLP**2


def _smaller(attention: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Queries and keys have norms of their own; values, and what is made of them, keep the factor until after `to_out`."""
    return (inputs[0] * ATTENTION, *inputs[1:])


def _gated(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * (value * MLP)
