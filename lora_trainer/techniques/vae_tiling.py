"""Encode and decode images in tiles, where the VAE would not fit whole (engine/vae_tiling.py). The caching phase and the
preview apply it; images encoded in tiles differ from whole ones, so their entries have keys of their own."""

from ..config.declared import Both, Declared
from ..seam.technique import Asked, Technique


class VaeTiling(Technique):
    title = ("VAE em blocos", "VAE tiling")
    when = ("imagens grandes, ao codificar e nas amostras", "large images, while encoding and in previews")
    options = (Declared(
        ("memory", "vae_tiling"), "vae_em_blocos", place=60, phases=frozenset({"", "cache", "latent_cache", "preview"}),
        elsewhere="vae_batch_size enable_vae_tiling", docs=(
            "Codifica e decodifica imagens em blocos.", "Encode and decode images in tiles.")),)
    mildness = 45

    @classmethod
    def changes(cls) -> Both:
        return "de latentes codificados em blocos, um pouco", "of latents encoded in tiles, slightly"

    @classmethod
    def of(cls, asked: Asked) -> None:
        """No part of training."""


TECHNIQUE = VaeTiling
