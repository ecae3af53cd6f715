"""A tiny Chroma for tests."""

from ...bases.tiny import TINY_T5, TINY_VAE, Encoder, Tiny
from ..flux import names

TRANSFORMER = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 32, "axes_dims_rope": [4, 14, 14], "approximator_num_channels": 32,
    "approximator_hidden_dim": 64, "approximator_layers": 2,
}  # fmt: skip

TINY = Tiny(
    pipeline="ChromaPipeline",
    parts={"transformer": TRANSFORMER, "text_encoder": Encoder("t5", "t5xxl", TINY_T5), "vae": TINY_VAE},
    narrow={"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2, "approximator_hidden_dim": 320},
    gguf="chroma",
    places=names.CHROMA.places_of,
    wide_in_scaled=("distilled_guidance_layer.",),
)
