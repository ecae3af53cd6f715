"""Z-Image's own layout of its transformer, which ComfyUI's files, GGUF files and kohya LoRAs have.

q, k and v are one matrix there, as in Lumina 2, from which it comes; the patch's size is not part of the names. Else
diffusers' names are the original's.
"""

from collections.abc import Mapping
from typing import Any

from ...bases.originals import Original, spelled
from ...bases.weights import Locate

PATCH_KEY = "2-1"
_LISTS = ("layers", "noise_refiner", "context_refiner", "siglip_refiner")
_ATTENTION = ("qkv", "out", "q_norm", "k_norm")
_OUTSIDE = ("x_embedder", "final_layer.linear", "final_layer.adaLN_modulation.1")
Z_IMAGE = Original(
    "convert_z_image_transformer_checkpoint_to_diffusers",
    (
        *(f"{name}.{leaf}" for name in _OUTSIDE for leaf in ("weight", "bias")),
        *(f"{blocks}.{{}}.attention.{name}.weight" for blocks in _LISTS for name in _ATTENTION),
    ),
    ("x_embedder.weight", "final_layer.linear.weight"),
)


def derive(header: Any, standard: Mapping[str, Any]) -> tuple[dict[str, Any], Locate]:
    """Config and places of a transformer in a single file, with the original's names or diffusers'."""
    file = spelled(header, Z_IMAGE, "cap_pad_token")
    width, inputs = file.sides(f"all_x_embedder.{PATCH_KEY}")
    head = (file.shape("layers.0.attention.norm_q.weight") or (1,))[0]
    patch = int(standard["all_patch_size"][0])

    def count(blocks: str) -> int:
        return file.count(f"{blocks}.{{}}.attention_norm1.weight")

    config = dict(standard) | {
        "in_channels": inputs // patch**2,
        "dim": width,
        "n_layers": count("layers"),
        "n_refiner_layers": count("noise_refiner"),
        "n_heads": max(1, width // head),
        "n_kv_heads": max(1, width // head),
        "cap_feat_dim": file.sides("cap_embedder.1")[1],
        "axes_dims": [axis * head // sum(standard["axes_dims"]) for axis in standard["axes_dims"]],
    }
    if "siglip_pad_token" in file:
        config["siglip_feat_dim"] = file.sides("siglip_embedder.1")[1]
    return config, file.locate
