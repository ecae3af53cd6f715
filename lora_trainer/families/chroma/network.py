"""Chroma's transformer: diffusers' own, with padding hidden, and without the entries of FLUX's config that it does not have."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

NOT_CHROMAS = ("guidance_embeds", "pooled_projection_dim")
"""FLUX's entries that the released config has kept."""


class HidesKeys(FluxAttnProcessor):
    """diffusers' masks hide every pair with padding in it, which leaves a padding token nothing to attend to, and a kernel
    may answer NaN. Here only keys are hidden: what padding sees is of no consequence."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """`attention_mask` (B, 1, L, L); its last row is an image token's."""
        keys = None if attention_mask is None else attention_mask[:, :, -1:]
        return super().__call__(attn, hidden_states, encoder_hidden_states, keys, image_rotary_emb)


def build(config: Mapping[str, Any]) -> nn.Module:
    known = {name: value for name, value in config.items() if name not in NOT_CHROMAS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of diffusers, to itself
        transformer = ChromaTransformer2DModel.from_config(known)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.attn.set_processor(HidesKeys())
    with torch.device("cpu"):  # which modulation is asked for: a table of sines that no file has
        rows, channels = transformer.time_text_embed.mod_proj.shape
        transformer.time_text_embed = type(transformer.time_text_embed)(channels // 2, rows)
    built: nn.Module = transformer
    return built
