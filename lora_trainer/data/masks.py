"""Pairs mask files with images: `name-masklabel.png` beside the image, or the same name in a folder of masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import t
from .images import ImageFacts
from .walk import MASK_ENDING, Found, stem_key, walk


@dataclass(frozen=True)
class Mask:
    path: Path
    content: str


def mask_paths(images: Sequence[Path], found: Found, mask_dir: Path | None) -> dict[Path, Path]:
    """Image -> its mask file, where there is one."""
    if mask_dir is None or mask_dir.resolve() == found.root.resolve():  # beside them, or each would be its own mask
        return {image: found.masks[key] for image in images if (key := stem_key(image)) in found.masks}
    source = walk(mask_dir)
    files = [path for folder in source.folders for path in folder.images] + list(source.masks.values())
    by_place = {_place(path, source.root): path for path in files}
    return {image: by_place[key] for image in images if (key := _place(image, found.root)) in by_place}


def _place(path: Path, root: Path) -> str:
    return stem_key(path.relative_to(root)).removesuffix(MASK_ENDING)


def shape_problem(mask: ImageFacts, image: ImageFacts) -> str:
    """Why the mask cannot lie on the image, or "". Another size of the same shape is fine, within 2 %."""
    (mw, mh), (iw, ih) = mask.size, image.size
    if abs(mw * ih / (mh * iw) - 1) <= 0.02:
        return ""
    return t(pt=f"máscara de {mw}x{mh} para imagem de {iw}x{ih}", en=f"mask of {mw}x{mh} for an image of {iw}x{ih}")
