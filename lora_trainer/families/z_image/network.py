"""Z-Image's transformer: diffusers' own, without tables, and computed in fp16 at a fraction of its size.

In fp16, whose largest number its attention and MLPs pass: both are computed at a fraction of their size.

What comes out of either goes through an RMS norm, which takes the size off again (ComfyUI's pull request 11187 and
musubi-tuner's 795 found so); with the norms' epsilon made as much smaller, the answer is exactly that of the unscaled network.
Powers of two, so nothing is rounded. bf16 needs none of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

ATTENTION, MLP = 2.0**-2, 2.0**-5


class Rotations:
    """diffusers' RopeEmbedder without its tables, which it would leave on the device after the first step: computed when asked
    for, to the same bit."""

    def __init__(self, theta: float, axes_dims: Sequence[int]) -> None:
        self.theta, self.axes_dims = theta, axes_dims

    def __call__(self, ids: Tensor) -> Tensor:
        """Places (L, axes) -> (L, head / 2) complex64."""
        angles = []
        for axis, dim in enumerate(self.axes_dims):
            steps = torch.arange(0, dim, 2, dtype=torch.float64, device=ids.device) / dim
            angles.append(torch.outer(ids[:, axis].double(), 1.0 / self.theta**steps).float())
        angle = torch.cat(angles, -1)
        return torch.polar(torch.ones_like(angle), angle)


def build(config: Mapping[str, Any]) -> nn.Module:
    transformer: Any = ZImageTransformer2DModel.from_config(dict(config))
    transformer.rope_embedder = Rotations(transformer.rope_theta, transformer.axes_dims)
    return cast(nn.Module, transformer)


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
