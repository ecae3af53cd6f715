"""Black Forest Labs' layout of a FLUX transformer, or of Chroma, made from it: single files, GGUF files and kohya LoRAs have it.

q, k and v are one matrix there, and in single-stream blocks the MLP's first layer too; diffusers takes them apart. The last
modulation's halves (scale, shift) are exchanged in diffusers.
"""

from collections.abc import Mapping
from typing import Any

from ...bases.originals import Original, spelled
from ...bases.weights import Locate

_BLOCKS = ("double_blocks.{}.", "single_blocks.{}.")
_MARKS = ("double_blocks.0.img_attn.qkv.weight",)
FLUX = Original("convert_flux_transformer_checkpoint_to_diffusers", (*_BLOCKS, "guidance_in."), _MARKS)
CHROMA = Original(
    "convert_chroma_transformer_checkpoint_to_diffusers", (*_BLOCKS, "distilled_guidance_layer.layers.{}."), _MARKS
)
"""The latter's approximator replaces all modulations."""
RELEASED_WIDTH = 3072
"""diffusers reads kohya files of this width only."""


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Black Forest Labs' names or diffusers'.

    `standard` is the released model's config: what it does not name, its class does not have.
    """
    original = CHROMA if "approximator_layers" in standard else FLUX
    file = spelled(header, original, "x_embedder.weight")
    width, channels = file.sides("x_embedder")
    head = (file.shape("transformer_blocks.0.attn.norm_q.weight") or (int(standard["attention_head_dim"]),))[0]
    approximator = file.sides("distilled_guidance_layer.in_proj")
    derived = {
        "in_channels": channels,
        "num_layers": file.count("transformer_blocks.{}.attn.to_q.weight"),
        "num_single_layers": file.count("single_transformer_blocks.{}.attn.to_q.weight"),
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": file.sides("context_embedder")[1],
        "pooled_projection_dim": file.sides("time_text_embed.text_embedder.linear_1")[1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in file,
        "axes_dims_rope": [axis * head // 128 for axis in (16, 56, 56)],
        "approximator_hidden_dim": approximator[0],
        "approximator_num_channels": approximator[1],
        "approximator_layers": file.count("distilled_guidance_layer.layers.{}.linear_1.weight"),
    }
    return dict(standard) | {name: value for name, value in derived.items() if name in standard}, file.locate
