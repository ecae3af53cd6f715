"""What tells a Qwen-Image from other bases, and its VAE, which is Wan 2.1's."""

from ...files.classify import has, transformer, vae_of
from ...files.kinds import IN_VAE, Kind, Signature

QWEN_IMAGE = transformer(
    "qwen_image", "um Qwen-Image", "a Qwen-Image", has("transformer_blocks.0.img_mod.1."), ("QwenImage",)
)
VAE_QWEN = Kind(
    "vae_qwen", "um VAE do Qwen-Image ou do Wan", "a VAE of Qwen-Image or Wan", IN_VAE,
    has("encoder.downsamples.0.residual.0.gamma", "encoder.mid_block.resnets.0.norm1.gamma"),
    vae_of("AutoencoderKLQwenImage"), part=True,
)  # fmt: skip
SIGNATURE = Signature((QWEN_IMAGE,), (VAE_QWEN,), caption_tokens=(128, 256, 512, 1024))
