"""A tiny Stable Diffusion 3.5 for tests, and SD3-medium. Four blocks: one with a second attention, two plain, and the last."""

from ...bases.tiny import TINY_CLIP, TINY_T5, TINY_VAE, Encoder, Tiny
from . import names

TRANSFORMER = {
    "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 96,
    "caption_projection_dim": 64, "pooled_projection_dim": 72, "pos_embed_max_size": 24, "dual_attention_layers": [0],
}  # fmt: skip
MEDIUM = {"attention_head_dim": 64, "num_attention_heads": 1, "dual_attention_layers": [], "qk_norm": None}
CLIP_G = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 13, "num_attention_heads": 1, "projection_dim": 40}
"""CLIP-G is told from CLIP-L, which has 12 layers, by their number."""
PROJECTED, ALONE = ({"architectures": [name]} for name in ("CLIPTextModelWithProjection", "CLIPTextModel"))


TINY = Tiny(
    pipeline="StableDiffusion3Pipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": TINY_VAE,
        "text_encoder": Encoder("clip", "clip_l", {**TINY_CLIP, "projection_dim": 32, **PROJECTED}, in_files=ALONE),
        "text_encoder_2": Encoder("clip", "clip_g", CLIP_G, pad="!"),
        "text_encoder_3": Encoder("t5", "t5xxl", {**TINY_T5, "d_model": 96}),
    },
    narrow={"num_layers": 4, "num_attention_heads": 2, "caption_projection_dim": 128, "dual_attention_layers": [0, 1],
            "pos_embed_max_size": 64},
    gguf="sd3",
    places=names.SD3.places_of,
    vae_file="sd3_vae",
    vae_prefix="first_stage_model.",
    index={"image_encoder": [None, None], "feature_extractor": [None, None]},
)  # fmt: skip
VARIANTS = {"medium": TINY.changed("transformer", MEDIUM)}
