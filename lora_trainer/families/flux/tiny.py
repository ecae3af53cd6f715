"""A tiny FLUX.1 for tests: dev, and schnell, which knows no guidance."""

from ...bases.tiny import TINY_CLIP, TINY_T5, TINY_VAE, Encoder, Tiny
from . import names

TRANSFORMER = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": [4, 14, 14],
}  # fmt: skip

TINY = Tiny(
    pipeline="FluxPipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": TINY_VAE,
        "text_encoder": Encoder("clip", "clip_l", TINY_CLIP),
        "text_encoder_2": Encoder("t5", "t5xxl", TINY_T5),
    },
    narrow={"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2},
    gguf="flux",
    places=names.FLUX.places_of,
    training={"peso_niveis": "cosmap", "orientacao": 2},
)
VARIANTS = {"schnell": TINY.changed("transformer", {"guidance_embeds": False})}
