"""A tiny Z-Image for tests: base and Turbo, which the scheduler's shift tells apart."""

from dataclasses import replace

from ...bases.tiny import TINY_VAE, Encoder, Tiny
from . import names

TRANSFORMER = {
    "dim": 96, "n_heads": 3, "n_kv_heads": 3, "n_layers": 2, "n_refiner_layers": 2, "cap_feat_dim": 32, "axes_dims": [8, 12, 12],
}  # fmt: skip

TINY = Tiny(
    pipeline="ZImagePipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": TINY_VAE,
        "text_encoder": Encoder("qwen3", "qwen_3_4b", {"layers": 3}, inside="qwen3_4b"),
    },
    narrow={"dim": 384, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3, "n_refiner_layers": 1},
    gguf="lumina2",
    places=names.Z_IMAGE.places_of,
)
VARIANTS = {"turbo": replace(TINY, scheduler={"shift": 3.0})}
