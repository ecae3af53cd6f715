"""What tells a Stable Diffusion 3 from other bases, in the original or with diffusers' names."""

from ...files.classify import transformer
from ...files.headers import Header
from ...files.kinds import Signature

_DIFFUSERS = {"pos_embed.pos_embed", "time_text_embed.text_embedder.linear_1.weight", "context_embedder.weight"}


def _file(header: Header) -> bool:
    """AuraFlow has such a position table too, and ControlNets have all of it."""
    if any("joint_blocks.0." in name for name in header):
        return True
    return header.keys() >= _DIFFUSERS and not any(name.startswith("controlnet_blocks.") for name in header)


SD3 = transformer("sd3", "um Stable Diffusion 3", "a Stable Diffusion 3", _file, ("SD3", "StableDiffusion3"))
SIGNATURE = Signature((SD3,), caption_tokens=(128, 256, 512))
