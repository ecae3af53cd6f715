"""What tells a Z-Image from other bases: Lumina 2's layers, and tokens for padding besides."""

from ...files.classify import ends, every, has, transformer
from ...files.kinds import Signature

Z_IMAGE = transformer(
    "z_image", "um Z-Image", "a Z-Image",
    every(has("noise_refiner.0."), has("cap_embedder.0.", ".caption_embedder.0."), ends("cap_pad_token")), ("ZImage",),
    before=("lumina2",),
)  # fmt: skip
SIGNATURE = Signature((Z_IMAGE,), caption_tokens=(128, 256, 512))
