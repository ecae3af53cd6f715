"""What tells a Chroma from other bases: one network for all modulations. Its blocks are named as FLUX.1's."""

from ...files.classify import has, transformer
from ...files.kinds import Signature, Words

CHROMA = transformer("chroma", "um Chroma", "a Chroma", has("distilled_guidance_layer."), ("Chroma",), before=("flux",))
RADIANCE = transformer(
    "chroma_radiance", "um Chroma1-Radiance, que desenha pixels", "a Chroma1-Radiance, which draws pixels",
    has("nerf_blocks.", "img_in_patch."), before=("chroma", "flux"),
    way_out=Words(
        pt="use o Chroma1-HD ou o Chroma1-Base, que desenham com o VAE do FLUX.1",
        en="use Chroma1-HD or Chroma1-Base, which draw with FLUX.1's VAE",
    ),
)  # fmt: skip
SIGNATURE = Signature((CHROMA,), (RADIANCE,), caption_tokens=(128, 256, 512))
