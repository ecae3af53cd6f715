"""Stability's layout of an SD3 transformer: single files, GGUF files and kohya LoRAs have it.

q, k and v are one matrix there; diffusers takes it apart. The halves (shift, scale) of the modulations without a gate, the
output's and that of the last block's text, are exchanged in diffusers.
"""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from ...bases.originals import Original, spelled
from ...bases.weights import Locate

HEAD = 64
"""Channels of an attention head, where no norm tells them."""
SD3 = Original(
    "convert_sd3_transformer_checkpoint_to_diffusers",
    ("joint_blocks.{}.x_block.attn2.", "joint_blocks.0.ln_q"),
    ("joint_blocks.0.x_block.attn.qkv.weight",),
)
"""As if every block had a second attention, and norms: what a model lacks, nobody asks for."""


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Stability's names or diffusers'."""
    file = spelled(header, SD3, "pos_embed.pos_embed")
    width, channels, patch, _ = file.sides("pos_embed.proj", 4)
    layers = file.count("transformer_blocks.{}.attn.to_q.weight")
    norm = file.shape("transformer_blocks.0.attn.norm_q.weight")
    head = norm[0] if norm else HEAD
    config = dict(standard) | {
        "in_channels": channels,
        "out_channels": file.sides("proj_out")[0] // max(1, patch**2),
        "patch_size": max(1, patch),
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": file.sides("context_embedder")[1],
        "caption_projection_dim": width,
        "pooled_projection_dim": file.sides("time_text_embed.text_embedder.linear_1")[1],
        "pos_embed_max_size": isqrt((file.shape("pos_embed.pos_embed") or (1, 1, 1))[-2]),
        "dual_attention_layers": [i for i in range(layers) if f"transformer_blocks.{i}.attn2.to_q.weight" in file],
        "qk_norm": "rms_norm" if norm else None,
    }
    return config, file.locate
