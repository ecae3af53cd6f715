"""Stability's names for the layers of an SD3 transformer: how single files, GGUF files and kohya LoRAs spell them.

q, k and v are one matrix there; diffusers takes it apart. The halves (shift, scale) of the modulations without a gate, the
output's and that of the last block's text, are exchanged in diffusers. One table serves reading bases and naming LoRA layers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ...bases.single_file import locate_same
from ...bases.weights import Locate, Piece
from ...files.kinds import Part, find_part

HEAD = 64
"""Channels of an attention head, where no norm tells them."""
_OUTSIDE = {
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "context_embedder": "context_embedder", "pos_embed.proj": "x_embedder.proj", "proj_out": "final_layer.linear",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
}  # fmt: skip
_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1", "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj", "attn.to_add_out": "context_block.attn.proj", "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1", "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1", "ff_context.net.2": "context_block.mlp.fc2",
    "attn.norm_q": "x_block.attn.ln_q", "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q", "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.norm_q": "x_block.attn2.ln_q", "attn2.norm_k": "x_block.attn2.ln_k",
}  # fmt: skip
_FUSED = {
    **{f"attn.to_{letter}": ("x_block.attn.qkv", index) for index, letter in enumerate("qkv")},
    **{f"attn2.to_{letter}": ("x_block.attn2.qkv", index) for index, letter in enumerate("qkv")},
    **{f"attn.add_{letter}_proj": ("context_block.attn.qkv", index) for index, letter in enumerate("qkv")},
}


@dataclass(frozen=True)
class Original:
    """A layer in the original: its name, which third of a fused matrix it is, whether its halves are exchanged there."""

    name: str
    third: int | None = None
    swapped: bool = False


def original(layer: str, layers: int) -> Original | None:
    """`layer` as diffusers names it, without `.weight`; `layers`: how many blocks there are. None for unknown ones."""
    if layer in _OUTSIDE:
        return Original(_OUTSIDE[layer], swapped=layer == "norm_out.linear")
    block = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", layer)
    if block is None:
        return None
    start, rest = f"joint_blocks.{block[1]}", block[2]
    if rest in _FUSED:
        name, third = _FUSED[rest]
        return Original(f"{start}.{name}", third)
    last = int(block[1]) == layers - 1
    known = _BLOCK.get(rest)
    return Original(f"{start}.{known}", swapped=last and rest == "norm1_context.linear") if known else None


def locate(part: Part, layers: int) -> Locate:
    """Module name -> key, for a file in the original layout."""

    def pieces(name: str) -> list[Piece]:
        if name == "pos_embed.pos_embed":
            return [Piece(part.key("pos_embed"))]
        layer, _, leaf = name.rpartition(".")
        found = original(layer, layers)
        assert found is not None, f"no key for {name}"
        return [Piece(part.key(f"{found.name}.{leaf}"), third=found.third, swapped=found.swapped)]

    return pieces


@dataclass(frozen=True)
class _Spelling:
    """Of the layers that tell the architecture."""

    block: str
    qkv: str
    second: str
    norm: str
    table: str
    patches: str
    pooled: str
    out: str


_STABILITY = _Spelling(
    "joint_blocks.{}.x_block", "attn.qkv", "attn2.qkv", "attn.ln_q", "pos_embed", "x_embedder.proj", "y_embedder.mlp.0",
    "final_layer.linear",
)  # fmt: skip
_DIFFUSERS = _Spelling(
    "transformer_blocks.{}", "attn.to_q", "attn2.to_q", "attn.norm_q", "pos_embed.pos_embed", "pos_embed.proj",
    "time_text_embed.text_embedder.linear_1", "proj_out",
)  # fmt: skip


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with Stability's names or diffusers'."""
    if part := find_part(header, "joint_blocks.0.x_block.attn.qkv.weight"):
        config = dict(standard) | _sizes(part, _STABILITY)
        return config, locate(part, config["num_layers"])
    part = find_part(header, "pos_embed.pos_embed") or Part(header, "")
    prefix = part.prefix
    return dict(standard) | _sizes(part, _DIFFUSERS), lambda name: [Piece(prefix + piece.key) for piece in locate_same(name)]


def _sizes(part: Part, names: _Spelling) -> dict[str, Any]:
    def shape(layer: str, rank: int = 2) -> tuple[int, ...]:
        return part.shape(f"{layer}.weight") or (0,) * rank

    width, channels, patch, _ = shape(names.patches, 4)
    layers = part.count(f"{names.block}.{names.qkv}.weight")
    norm = part.shape(f"{names.block.format(0)}.{names.norm}.weight")
    head = norm[0] if norm else HEAD
    return {
        "in_channels": channels,
        "out_channels": shape(names.out)[0] // max(1, patch**2),
        "patch_size": max(1, patch),
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": max(1, width // head),
        "joint_attention_dim": shape("context_embedder")[1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shape(names.pooled)[1],
        "pos_embed_max_size": isqrt((part.shape(names.table) or (1, 1, 1))[-2]),
        "dual_attention_layers": [i for i in range(layers) if f"{names.block.format(i)}.{names.second}.weight" in part],
        "qk_norm": "rms_norm" if norm else None,
    }
