"""Black Forest Labs' names for the layers of a FLUX transformer: how single files, GGUF files and kohya LoRAs spell them.

q, k and v are one matrix there, and in single-stream blocks the MLP's first layer too; diffusers takes them apart. The last
modulation's halves (scale, shift) are exchanged in diffusers. One table serves reading bases and naming LoRA layers alike.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kinds import Part
from ._single_file import locate_same
from ._weights import Locate, Piece

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")
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
_LINEAR1 = {"attn.to_q": 0, "attn.to_k": 1, "attn.to_v": 2, "proj_mlp": 3}
MLP_RATIO = 4


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


def find_part(header: Any) -> Part | None:
    """The transformer inside a single file in the original layout."""
    parts = [Part(header, prefix) for prefix in PREFIXES]
    return next((part for part in parts if "double_blocks.0.img_attn.qkv.weight" in part), None)


def locate(part: Part, width: int) -> Locate:
    """Module name -> key, for a file in the original layout."""

    def pieces(name: str) -> list[Piece]:
        layer, _, leaf = name.rpartition(".")
        found = original(layer, width)
        assert found is not None, f"no key for {name}"
        leaf = "scale" if found.name.endswith(("query_norm", "key_norm")) else leaf
        return [Piece(part.key(f"{found.name}.{leaf}"), rows=found.span, swapped=layer == "norm_out.linear")]

    return pieces


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Black Forest Labs' names or diffusers'."""
    if part := find_part(header):
        names = ("double_blocks", "single_blocks", "img_in", "txt_in", "vector_in.in_layer", "guidance_in.in_layer")
        norm, qkv = "double_blocks.0.img_attn.norm.query_norm.scale", "img_attn.qkv"
        single = "linear1"
    else:
        part = next(p for p in (Part(header, prefix) for prefix in PREFIXES) if "x_embedder.weight" in p)
        names = (
            "transformer_blocks", "single_transformer_blocks", "x_embedder", "context_embedder",
            "time_text_embed.text_embedder.linear_1", "time_text_embed.guidance_embedder.linear_1",
        )  # fmt: skip
        norm, qkv, single = "transformer_blocks.0.attn.norm_q.weight", "attn.to_q", "attn.to_q"
    double_name, single_name, image, text, pooled, guidance = names
    shapes = {name: part.shape(f"{name}.weight") or (0, 0) for name in (image, text, pooled)}
    head = (part.shape(norm) or (int(standard["attention_head_dim"]),))[0]
    width = shapes[image][0]
    config = dict(standard) | {
        "in_channels": shapes[image][1],
        "num_layers": part.count(f"{double_name}.{{}}.{qkv}.weight"),
        "num_single_layers": part.count(f"{single_name}.{{}}.{single}.weight"),
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": shapes[text][1],
        "pooled_projection_dim": shapes[pooled][1],
        "guidance_embeds": f"{guidance}.weight" in part,
        "axes_dims_rope": [axis * head // 128 for axis in (16, 56, 56)],
    }
    if find_part(header):
        return config, locate(part, width)
    prefix = part.prefix
    return config, lambda name: [Piece(prefix + piece.key) for piece in locate_same(name)]
