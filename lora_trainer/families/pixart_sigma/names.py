"""PixArt's own names for its transformer, which its authors' files, ComfyUI's and kohya LoRAs have.

q, k and v of the self-attention are one matrix there, k and v of the other attention another. diffusers' converter is a script
(convert_pixart_sigma_to_diffusers.py) and no part of the library, so its table stands here; it reads no norms of q and k,
which no release has.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from math import isqrt
from typing import Any

from ...bases.originals import Places, locate
from ...bases.weights import Locate, Piece, Share, Spelled
from ...files.kinds import Part, find_part

_EMBEDDERS = {"timestep": "t_embedder", "resolution": "csize_embedder", "aspect_ratio": "ar_embedder"}
OUTSIDE = {
    "pos_embed.proj": "x_embedder.proj", "adaln_single.linear": "t_block.1", "proj_out": "final_layer.linear",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1", "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    **{f"adaln_single.emb.{ours}_embedder.linear_{n}": f"{theirs}.mlp.{2 * n - 2}"
       for ours, theirs in _EMBEDDERS.items() for n in (1, 2)},
}  # fmt: skip
BLOCK = {
    "attn1.to_out.0": "attn.proj", "attn2.to_q": "cross_attn.q_linear", "attn2.to_out.0": "cross_attn.proj",
    "ff.net.0.proj": "mlp.fc1", "ff.net.2": "mlp.fc2",
}  # fmt: skip
FUSED = {"attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v")}
TABLE = "scale_shift_table"


def places(blocks: int) -> Places:
    """Of a transformer with so many blocks."""
    layers = {ours: Piece(theirs) for ours, theirs in OUTSIDE.items()}
    tables = {TABLE: Piece(f"final_layer.{TABLE}")}
    for number in range(blocks):
        start, own = f"transformer_blocks.{number}", f"blocks.{number}"
        tables[f"{start}.{TABLE}"] = Piece(f"{own}.{TABLE}")
        layers |= {f"{start}.{ours}": Piece(f"{own}.{theirs}") for ours, theirs in BLOCK.items()}
        for theirs, parts in FUSED.items():
            shares = zip(parts, shares_of(len(parts)), strict=True)
            layers |= {f"{start}.{ours}": Piece(f"{own}.{theirs}", share=share) for ours, share in shares}
    pieces = {f"{ours}.{leaf}": _leaf(piece, leaf) for ours, piece in layers.items() for leaf in ("weight", "bias")}
    fused = {
        f"blocks.{number}.{theirs}.{leaf}": shares_of(len(parts))
        for number in range(blocks) for theirs, parts in FUSED.items() for leaf in ("weight", "bias")
    }  # fmt: skip
    return Places(tables | pieces, fused)


def shares_of(parts: int) -> list[Share]:
    return [(Fraction(number, parts), Fraction(1, parts)) for number in range(parts)]


def _leaf(piece: Piece, leaf: str) -> Piece:
    return Piece(f"{piece.key}.{leaf}", share=piece.share)


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with PixArt's names or diffusers'.

    The picture it was made for is told by the authors' table of positions alone, where a file has it; else it is 1024 pixels.
    """
    original = find_part(header, "y_embedder.y_proj.fc1.weight")
    part = original or find_part(header, "adaln_single.linear.weight") or Part(header, "")
    known = places(original.count("blocks.{}.attn.qkv.weight")) if original else Places()
    file = Spelled(header, partial(locate, part, known))
    width, channels, patch, _ = file.sides("pos_embed.proj", 4)
    head, table = int(standard["attention_head_dim"]), part.shape("pos_embed")
    side = isqrt(table[-2]) * patch if table else int(standard["sample_size"])
    config = dict(standard) | {
        "in_channels": channels,
        "out_channels": file.sides("proj_out")[0] // max(1, patch**2),
        "patch_size": max(1, patch),
        "num_layers": file.count("transformer_blocks.{}.attn1.to_q.weight"),
        "num_attention_heads": max(1, width // head),
        "cross_attention_dim": file.sides("transformer_blocks.0.attn2.to_k")[1],
        "caption_channels": file.sides("caption_projection.linear_1")[1],
        "sample_size": side,
        "interpolation_scale": side / 64,
        "use_additional_conditions": "adaln_single.emb.resolution_embedder.linear_1.weight" in file,
    }
    return config, file.locate
