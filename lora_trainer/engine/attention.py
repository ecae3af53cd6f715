"""Attention in chunks of queries, where no fused kernel can serve: exact, and the scores never stand in memory whole.

Unfused, attention holds a score for each pair of positions: a VAE's single head of 512 channels at 1024² (128² latents)
takes 1 GiB in float32, twice. Fused kernels hold none, and nearly every card has one for any head (`fuses`); so this is
for the rest. With gradients each chunk is recomputed in the backward pass, or its scores would be kept after all.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SCORE_BYTES = 1 << 26
"""Scores that may stand in memory at once."""


def fuses(heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch has a fused attention kernel for such heads on this device."""
    if device.type != "cuda":
        return True  # the CPU's kernel takes any head
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    probe = torch.empty(1, heads, 64, head_dim, device=device, dtype=dtype)
    params = SDPAParams(probe, probe, probe, None, 0.0, False, False)  # no mask, dropout, causality, shared heads
    return bool(can_use_flash_attention(params) or can_use_efficient_attention(params))


def chunked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, score_bytes: int = SCORE_BYTES
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V for (B, H, L, D) tensors and a mask that broadcasts to (B, H, L, S)."""
    row_bytes = query.shape[0] * query.shape[1] * key.shape[2] * max(query.element_size(), 4)
    rows = max(1, score_bytes // row_bytes)
    if rows >= query.shape[2]:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out = []
    for start in range(0, query.shape[2], rows):
        part = query[:, :, start : start + rows]
        part_mask = mask[..., start : start + rows, :] if mask is not None and mask.shape[-2] > 1 else mask
        out.append(_attend(part, key, value, part_mask))
    return torch.cat(out, dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return cast(
        Tensor,
        checkpoint(
            F.scaled_dot_product_attention, query, key, value, mask, use_reentrant=False, preserve_rng_state=False
        ),
    )


class ChunkedProcessor:
    """diffusers' attention processor of the same steps, with `chunked_attention` in the middle."""

    def __init__(self, score_bytes: int = SCORE_BYTES) -> None:
        self.score_bytes = score_bytes

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        residual, shape = hidden_states, hidden_states.shape
        if len(shape) == 4:
            hidden_states = hidden_states.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = [
            projected.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for projected in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        ]
        if attention_mask is not None:
            length, batch = context.shape[1], context.shape[0]
            attention_mask = attn.prepare_attention_mask(attention_mask, length, batch)
            attention_mask = cast(Tensor, attention_mask).view(batch, attn.heads, -1, length)
        out = chunked_attention(heads[0], heads[1], heads[2], attention_mask, score_bytes=self.score_bytes)
        out = attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))
        if len(shape) == 4:
            out = out.transpose(-1, -2).reshape(shape)
        if attn.residual_connection:
            out = out + residual
        return cast(Tensor, out / attn.rescale_output_factor)


def slice_where_unfused(module: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """`slice_attention` if some head inside has no fused kernel; returns how many layers were changed."""
    heads = {(layer.heads, layer.inner_dim // layer.heads) for layer in _attention_layers(module)}
    return 0 if all(fuses(count, size, device, dtype) for count, size in heads) else slice_attention(module)


def slice_attention(module: nn.Module, *, score_bytes: int = SCORE_BYTES) -> int:
    """Let every attention layer inside work in chunks; returns how many there are. Plain layers only."""
    found = _attention_layers(module)
    for layer in found:
        layer.processor = ChunkedProcessor(score_bytes)
    return len(found)


def _attention_layers(module: nn.Module) -> list[Any]:
    from diffusers.models.attention_processor import Attention

    return [layer for layer in module.modules() if isinstance(layer, Attention) and _is_plain(layer)]


def _is_plain(layer: Any) -> bool:
    extras = (layer.spatial_norm, layer.norm_q, layer.norm_k, layer.norm_cross or None, layer.add_k_proj)
    return all(extra is None for extra in extras)
