"""What tells a FLUX.1 from other bases, with Black Forest Labs' names or diffusers'."""

from ...files.classify import has, transformer
from ...files.kinds import Signature

FLUX = transformer(
    "flux", "um FLUX.1", "a FLUX.1", has("double_blocks.0.img_attn.", "single_transformer_blocks.0."), ("Flux",)
)
SIGNATURE = Signature((FLUX,), caption_tokens=(128, 256, 512))
