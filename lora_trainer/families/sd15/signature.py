"""What tells a Stable Diffusion 1.x or 2.x from other bases: a UNet of 4 channels and one text encoder.

Linear projections around the transformer blocks came with 2.0, as did OpenCLIP.
"""

from ...files.classify import Folder, beside_unet
from ...files.kinds import Kind, Signature


def _folder(folder: Folder, *, linear: bool) -> bool:
    unet, index = folder.unet, folder.index
    if not unet or unet.get("addition_embed_type") or unet.get("class_embed_type"):
        return False
    if index and (index.get("text_encoder_2") or "Stable" not in folder.pipeline):
        return False
    return bool(unet.get("use_linear_projection")) is linear


SD2 = Kind(
    "sd2", "um Stable Diffusion 2.x", "a Stable Diffusion 2.x", file=beside_unet("cond_stage_model.model.", labelled=False),
    folder=lambda folder: _folder(folder, linear=True), before=("sd1",),
)  # fmt: skip
SD1 = Kind(
    "sd1", "um Stable Diffusion 1.x", "a Stable Diffusion 1.x",
    file=beside_unet("cond_stage_model.transformer.", labelled=False), folder=lambda folder: _folder(folder, linear=False),
)  # fmt: skip
SIGNATURE = Signature((SD1, SD2))
