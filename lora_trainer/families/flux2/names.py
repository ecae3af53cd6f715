"""Black Forest Labs' names for the layers of a FLUX.2 transformer: how single files, GGUF files and kohya LoRAs spell them.

As in FLUX.1, q, k and v of a double block are one matrix there, and the last modulation's halves are exchanged; the single
blocks' fused matrices are fused in diffusers too. Modulation lies outside the blocks, which share it.
"""

import re
from collections.abc import Mapping
from typing import Any

from ...bases.single_file import locate_same
from ...bases.weights import Locate, Piece
from ...files.kinds import Part, find_part
from ..flux.names import Original

_OUTSIDE = {
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}  # fmt: skip
_DOUBLE = {
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0", "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0", "ff_context.linear_out": "txt_mlp.2",
    "attn.norm_q": "img_attn.norm.query_norm", "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm", "attn.norm_added_k": "txt_attn.norm.key_norm",
}  # fmt: skip
_SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2",
    "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm",
}  # fmt: skip
_FUSED = {
    **{f"attn.to_{letter}": ("img_attn.qkv", index) for index, letter in enumerate("qkv")},
    **{f"attn.add_{letter}_proj": ("txt_attn.qkv", index) for index, letter in enumerate("qkv")},
}


def original(layer: str, width: int) -> Original | None:
    """`layer` as diffusers names it, without `.weight`; `width` of the hidden states. None where there is no such layer."""
    if layer in _OUTSIDE:
        return Original(_OUTSIDE[layer])
    block = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", layer)
    if block is None:
        return None
    start, rest = f"{'single' if block[1] else 'double'}_blocks.{block[2]}", block[3]
    if not block[1] and rest in _FUSED:
        name, slot = _FUSED[rest]
        return Original(f"{start}.{name}", slot, (width, width, width))
    known = (_SINGLE if block[1] else _DOUBLE).get(rest)
    return Original(f"{start}.{known}") if known else None


def locate(part: Part, width: int) -> Locate:
    """Module name -> key, for a file in the original layout; norms are `scale`, in ComfyUI's newer files `weight`."""

    def pieces(name: str) -> list[Piece]:
        layer, _, leaf = name.rpartition(".")
        found = original(layer, width)
        assert found is not None, f"no key for {name}"
        leaves = ("scale", "weight") if found.name.endswith(("query_norm", "key_norm")) else (leaf,)
        swapped = layer == "norm_out.linear"
        return [Piece(part.key(f"{found.name}.{leaf}"), rows=found.span, swapped=swapped) for leaf in leaves]

    return pieces


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Black Forest Labs' names or diffusers'."""
    if original_part := find_part(header, "double_stream_modulation_img.lin.weight"):
        part = original_part
        double, single, image, text, time = "double_blocks", "single_blocks", "img_in", "txt_in", "time_in.in_layer"
        guidance, mlp, qkv, linear1 = "guidance_in.in_layer", "img_mlp.2", "img_attn.qkv", "linear1"
        norms = ["img_attn.norm.query_norm.scale", "img_attn.norm.query_norm.weight"]
    else:
        part = find_part(header, "x_embedder.weight") or Part(header, "")
        double, single, image, text = "transformer_blocks", "single_transformer_blocks", "x_embedder", "context_embedder"
        time, guidance = (f"time_guidance_embed.{name}_embedder.linear_1" for name in ("timestep", "guidance"))
        mlp, qkv, linear1, norms = "ff.linear_out", "attn.to_q", "attn.to_qkv_mlp_proj", ["attn.norm_q.weight"]
    sizes = {name: part.shape(f"{name}.weight") or (0, 0) for name in (image, text, time, f"{double}.0.{mlp}")}
    width, channels = sizes[image]
    head = next((shape[0] for norm in norms if (shape := part.shape(f"{double}.0.{norm}"))), standard["attention_head_dim"])
    config = dict(standard) | {
        "in_channels": channels,
        "num_layers": part.count(f"{double}.{{}}.{qkv}.weight"),
        "num_single_layers": part.count(f"{single}.{{}}.{linear1}.weight"),
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": sizes[text][1],
        "timestep_guidance_channels": sizes[time][1],
        "mlp_ratio": sizes[f"{double}.0.{mlp}"][1] / max(1, width),
        "guidance_embeds": f"{guidance}.weight" in part,
        "axes_dims_rope": [head // 4] * 4,
    }
    if original_part:
        return config, locate(part, width)
    prefix = part.prefix
    return config, lambda name: [Piece(prefix + piece.key) for piece in locate_same(name)]
