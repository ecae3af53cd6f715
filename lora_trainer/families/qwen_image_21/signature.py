"""What tells a Qwen-Image 2.1 from other bases, and its VAE, which is Wan 2.2's."""

from ...files.classify import has, transformer, vae_of
from ...files.kinds import IN_VAE, Kind, Signature

QWEN_IMAGE_21 = transformer(
    "qwen_image_21", "um Qwen-Image 2.1", "a Qwen-Image 2.1", has("txt_in.text_norm.weight"), ("QwenImage21",),
    before=("qwen_image",),
)  # fmt: skip
VAE_QWEN_21 = Kind(
    "vae_qwen_21", "um VAE do Qwen-Image 2.1 ou do Wan 2.2", "a VAE of Qwen-Image 2.1 or Wan 2.2", IN_VAE,
    has("encoder.downsamples.0.downsamples.0.", "encoder.down_blocks.0.resnets.0.norm1.gamma"),
    vae_of("AutoencoderKLQwenImage21"), before=("vae_qwen",), part=True,
)  # fmt: skip
SIGNATURE = Signature((QWEN_IMAGE_21,), (VAE_QWEN_21,), caption_tokens=(128, 256, 512, 1024))
