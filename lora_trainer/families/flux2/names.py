"""Black Forest Labs' layout of a FLUX.2 transformer: single files, GGUF files and kohya LoRAs have it.

As in FLUX.1, q, k and v of a double block are one matrix there, and the last modulation's halves are exchanged; the single
blocks' fused matrices are fused in diffusers too. Modulation lies outside the blocks, which share it.
"""

from collections.abc import Mapping
from typing import Any

from ...bases.originals import Original, spelled
from ...bases.weights import Locate

_OUTSIDE = (
    "time_in.in_layer", "time_in.out_layer", "guidance_in.in_layer", "guidance_in.out_layer", "txt_in", "img_in",
    "double_stream_modulation_img.lin", "double_stream_modulation_txt.lin", "single_stream_modulation.lin",
    "final_layer.linear", "final_layer.adaLN_modulation.1",
)  # fmt: skip
_STREAM = ("attn.qkv.weight", "attn.proj.weight", "mlp.0.weight", "mlp.2.weight", "attn.norm.query_norm.scale",
           "attn.norm.key_norm.scale")  # fmt: skip
FLUX2 = Original(
    "convert_flux2_transformer_checkpoint_to_diffusers",
    (
        *(f"{name}.weight" for name in _OUTSIDE),
        *(f"double_blocks.{{}}.{stream}_{name}" for stream in ("img", "txt") for name in _STREAM),
        *(f"single_blocks.{{}}.{name}.weight" for name in ("linear1", "linear2")),
        *(f"single_blocks.{{}}.norm.{name}_norm.scale" for name in ("query", "key")),
    ),
    ("double_stream_modulation_img.lin.weight",),
)


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Black Forest Labs' names or diffusers'."""
    file = spelled(header, FLUX2, "x_embedder.weight")
    width, channels = file.sides("x_embedder")
    head = (file.shape("transformer_blocks.0.attn.norm_q.weight") or (int(standard["attention_head_dim"]),))[0]
    config = dict(standard) | {
        "in_channels": channels,
        "num_layers": file.count("transformer_blocks.{}.attn.to_q.weight"),
        "num_single_layers": file.count("single_transformer_blocks.{}.attn.to_qkv_mlp_proj.weight"),
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": file.sides("context_embedder")[1],
        "timestep_guidance_channels": file.sides("time_guidance_embed.timestep_embedder.linear_1")[1],
        "mlp_ratio": file.sides("transformer_blocks.0.ff.linear_out")[1] / max(1, width),
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in file,
        "axes_dims_rope": [head // 4] * 4,
    }
    return config, file.locate
