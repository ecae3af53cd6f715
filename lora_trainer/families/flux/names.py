"""Black Forest Labs' names for the layers of a FLUX transformer, or of Chroma, made from it: how single files, GGUF files
and kohya LoRAs spell them.

q, k and v are one matrix there, and in single-stream blocks the MLP's first layer too; diffusers takes them apart. The last
modulation's halves (scale, shift) are exchanged in diffusers. One table serves reading bases and naming LoRA layers alike.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...bases.single_file import locate_same
from ...bases.weights import Locate, Piece
from ...files.kinds import Part, find_part

_OUTSIDE = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "context_embedder": "txt_in", "x_embedder": "img_in", "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}  # fmt: skip
_DOUBLE = {
    "norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin",
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0", "ff_context.net.2": "txt_mlp.2",
    "attn.norm_q": "img_attn.norm.query_norm", "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm", "attn.norm_added_k": "txt_attn.norm.key_norm",
}  # fmt: skip
_SINGLE = {
    "norm.linear": "modulation.lin", "proj_out": "linear2",
    "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm",
}  # fmt: skip
_FUSED = {
    **{f"attn.to_{letter}": ("img_attn.qkv", index) for index, letter in enumerate("qkv")},
    **{f"attn.add_{letter}_proj": ("txt_attn.qkv", index) for index, letter in enumerate("qkv")},
}
_APPROXIMATOR = {"linear_1": "in_layer", "linear_2": "out_layer"}
"""Chroma's replacement of all modulations."""
_LINEAR1 = {"attn.to_q": 0, "attn.to_k": 1, "attn.to_v": 2, "proj_mlp": 3}
MLP_RATIO = 4
RELEASED_WIDTH = 3072
"""diffusers reads kohya files of this width only."""


@dataclass(frozen=True)
class Original:
    """A layer in the original: its name, which of the fused matrices it is, and how many rows each of them has."""

    name: str
    slot: int = 0
    rows: tuple[int, ...] = ()

    @property
    def span(self) -> tuple[int, int] | None:
        """First row, number of rows; None for a layer of its own."""
        return (sum(self.rows[: self.slot]), self.rows[self.slot]) if self.rows else None


def original(layer: str, width: int) -> Original | None:
    """`layer` as diffusers names it, without `.weight`; `width` of the hidden states. None where there is no such layer."""
    if layer in _OUTSIDE:
        return Original(_OUTSIDE[layer])
    if layer.startswith("distilled_guidance_layer."):
        start, _, last = layer.rpartition(".")
        return Original(f"{start}.{_APPROXIMATOR.get(last, last)}")
    block = re.fullmatch(r"(single_)?transformer_blocks\.(\d+)\.(.+)", layer)
    if block is None:
        return None
    start, rest = f"{'single' if block[1] else 'double'}_blocks.{block[2]}", block[3]
    if block[1] and rest in _LINEAR1:
        return Original(f"{start}.linear1", _LINEAR1[rest], (width, width, width, MLP_RATIO * width))
    if not block[1] and rest in _FUSED:
        name, slot = _FUSED[rest]
        return Original(f"{start}.{name}", slot, (width, width, width))
    known = (_SINGLE if block[1] else _DOUBLE).get(rest)
    return Original(f"{start}.{known}") if known else None


def is_scale(name: str) -> bool:
    """Of norms without a bias, whose `weight` is called `scale`."""
    return name.endswith(("query_norm", "key_norm")) or ".norms." in name


def locate(part: Part, width: int) -> Locate:
    """Module name -> key, for a file in the original layout."""

    def pieces(name: str) -> list[Piece]:
        layer, _, leaf = name.rpartition(".")
        found = original(layer, width)
        assert found is not None, f"no key for {name}"
        leaf = "scale" if is_scale(found.name) else leaf
        return [Piece(part.key(f"{found.name}.{leaf}"), rows=found.span, swapped=layer == "norm_out.linear")]

    return pieces


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Black Forest Labs' names or diffusers'.

    `standard` is the released model's config: what it does not name, its class does not have.
    """
    if original_part := find_part(header, "double_blocks.0.img_attn.qkv.weight"):
        part = original_part
        names = ("double_blocks", "single_blocks", "img_in", "txt_in", "vector_in.in_layer", "guidance_in.in_layer")
        norm, qkv = "double_blocks.0.img_attn.norm.query_norm.scale", "img_attn.qkv"
        single, deep = "linear1", "in_layer"
    else:
        part = find_part(header, "x_embedder.weight") or Part(header, "")
        names = (
            "transformer_blocks", "single_transformer_blocks", "x_embedder", "context_embedder",
            "time_text_embed.text_embedder.linear_1", "time_text_embed.guidance_embedder.linear_1",
        )  # fmt: skip
        norm, qkv, single, deep = "transformer_blocks.0.attn.norm_q.weight", "attn.to_q", "attn.to_q", "linear_1"
    double_name, single_name, image, text, pooled, guidance = names
    approximator = "distilled_guidance_layer.in_proj"
    found = {name: part.shape(f"{name}.weight") or () for name in (image, text, pooled, approximator)}
    shapes = {name: shape if len(shape) == 2 else (0, 0) for name, shape in found.items()}
    head = (part.shape(norm) or (int(standard["attention_head_dim"]),))[0]
    width = shapes[image][0]
    derived = {
        "in_channels": shapes[image][1],
        "num_layers": part.count(f"{double_name}.{{}}.{qkv}.weight"),
        "num_single_layers": part.count(f"{single_name}.{{}}.{single}.weight"),
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": shapes[text][1],
        "pooled_projection_dim": shapes[pooled][1],
        "guidance_embeds": f"{guidance}.weight" in part,
        "axes_dims_rope": [axis * head // 128 for axis in (16, 56, 56)],
        "approximator_hidden_dim": shapes[approximator][0],
        "approximator_num_channels": shapes[approximator][1],
        "approximator_layers": part.count(f"distilled_guidance_layer.layers.{{}}.{deep}.weight"),
    }
    config = dict(standard) | {name: value for name, value in derived.items() if name in standard}
    if original_part:
        return config, locate(part, width)
    prefix = part.prefix
    return config, lambda name: [Piece(prefix + piece.key) for piece in locate_same(name)]
