"""What tells an SDXL from other bases: a UNet told the picture's size, and two text encoders. The refiner has the second alone."""

from ...files.classify import Folder, beside_unet
from ...files.kinds import Kind, Signature


def _folder(folder: Folder) -> bool:
    first = folder.index.get("text_encoder") or [None, None]
    return folder.unet.get("addition_embed_type") == "text_time" and not (folder.index and first[1] is None)


SDXL = Kind(
    "sdxl", "um SDXL", "an SDXL", folder=_folder,
    file=beside_unet("conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.", labelled=True),
)  # fmt: skip
SIGNATURE = Signature((SDXL,))
