"""Z-Image's own names for its transformer, which ComfyUI's files, GGUF files and kohya LoRAs use.

q, k and v are one matrix there, as in Lumina 2, from which it comes; the patch's size is not part of the names. Else
diffusers' names are the original's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...bases.weights import Locate, Piece
from ...files.kinds import Part, find_part

PATCH_KEY = "2-1"
_OUTSIDE = {f"all_x_embedder.{PATCH_KEY}.": "x_embedder.", f"all_final_layer.{PATCH_KEY}.": "final_layer."}
_ATTENTION = {"to_out.0": "out", "norm_q": "q_norm", "norm_k": "k_norm"}
_FUSED = ("to_q", "to_k", "to_v")


@dataclass(frozen=True)
class Original:
    """A parameter in the original: its name, and which third of a fused matrix it is."""

    name: str
    third: int | None = None


def original(name: str) -> Original:
    """`name` of a parameter as diffusers has it."""
    for ours, theirs in _OUTSIDE.items():
        if name.startswith(ours):
            return Original(theirs + name.removeprefix(ours))
    found = re.fullmatch(r"(.+\.attention\.)(to_[qkv]|to_out\.0|norm_[qk])(\..+)", name)
    if found is None:
        return Original(name)
    start, layer, leaf = found.groups()
    if layer in _FUSED:
        return Original(f"{start}qkv{leaf}", _FUSED.index(layer))
    return Original(start + _ATTENTION[layer] + leaf)


def locate(part: Part) -> Locate:
    """Module name -> keys in a single file: with the original's names, or diffusers'."""

    def pieces(name: str) -> list[Piece]:
        found = original(name)
        return [Piece(part.key(found.name), third=found.third), Piece(part.key(name))]

    return pieces


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file."""
    part = find_part(header, "cap_pad_token") or Part(header, "")

    def shape(name: str) -> tuple[int, ...]:
        return part.shape(original(name).name) or part.shape(name) or (1, 1)

    def count(list_name: str) -> int:
        return part.count(f"{list_name}.{{}}.attention_norm1.weight")

    width, inputs = shape(f"all_x_embedder.{PATCH_KEY}.weight")[:2]
    head = shape("layers.0.attention.norm_q.weight")[0]
    patch = int(standard["all_patch_size"][0])
    config = dict(standard) | {
        "in_channels": inputs // patch**2,
        "dim": width,
        "n_layers": count("layers"),
        "n_refiner_layers": count("noise_refiner"),
        "n_heads": max(1, width // head),
        "n_kv_heads": max(1, width // head),
        "cap_feat_dim": shape("cap_embedder.1.weight")[1],
        "axes_dims": [axis * head // sum(standard["axes_dims"]) for axis in standard["axes_dims"]],
    }
    if "siglip_pad_token" in part:
        config["siglip_feat_dim"] = shape("siglip_embedder.1.weight")[1]
    return config, locate(part)
