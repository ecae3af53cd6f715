"""A tiny PixArt-Sigma for tests."""

from ...bases.originals import Places
from ...bases.tiny import TINY_T5, TINY_VAE, Encoder, Numbers, Tiny
from . import names

TRANSFORMER = {
    "num_layers": 4, "num_attention_heads": 4, "cross_attention_dim": 288, "caption_channels": 32, "attention_head_dim": 72,
}  # fmt: skip
"""Heads stay as wide as the released ones, since no tensor tells it, and all widths are multiples of 32, for GGUF."""


def places(config: Numbers) -> Places:
    return names.places(config["num_layers"])


TINY = Tiny(
    pipeline="PixArtSigmaPipeline",
    parts={"transformer": TRANSFORMER, "text_encoder": Encoder("t5", "t5xxl", TINY_T5), "vae": TINY_VAE},
    narrow={"num_layers": 4, "num_attention_heads": 4, "cross_attention_dim": 288},
    gguf="pixart",
    places=places,
    vae_file="sdxl_vae",
    training={"gama_min_snr": 5, "deslocamento_ruido": 0.05},
)
