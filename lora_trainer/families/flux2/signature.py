"""What tells a FLUX.2 from other bases: modulations that all blocks share. Its blocks are named as FLUX.1's."""

from ...files.classify import has, transformer
from ...files.kinds import Signature

FLUX2 = transformer(
    "flux2", "um FLUX.2", "a FLUX.2", has("double_stream_modulation_img."), ("Flux2",), before=("flux",)
)
SIGNATURE = Signature((FLUX2,), caption_tokens=(128, 256, 512))
