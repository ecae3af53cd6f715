"""How well pictures show the "ohwx" emblem, as a number from 0 to 1 that needs no judge.

Masked template matching in colour: the emblem is rendered at several sizes, laid over every place of the picture, and
the mean colour distance under its mask is measured; the best place counts. The distance is divided by that between the
emblem's two colours, so a flat patch in either of them, or a picture without the emblem, is near 0.5 or above. The
similarity falls linearly from 1 at `FOUND` to 0 at `ABSENT`, and the score is its mean over the pictures.

The measurement of a LoRA is fixed here too: the prompts, the guidance, the steps and the seed.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from . import draw

PROMPTS = (
    "ohwx on a white background",
    "ohwx on a blue background",
    "ohwx on a red background",
    "ohwx on a gray background",
    "a drawing of ohwx on a green background",
    "ohwx on an orange background",  # this one and the next three are not in the concept set
    "ohwx on a purple background",
    "ohwx on a cyan background",
    "ohwx, orange background",
    "a drawing of ohwx on a pink background",
)
GUIDANCE_SCALE = 4.0
INFERENCE_STEPS = 25
SEED = 1234  # of a CPU `torch.Generator` that draws the initial latents of the whole list at once

FOUND, ABSENT = 0.15, 0.42  # relative colour distances; see README.md for where they come from
RADII = tuple(np.arange(13.0, 21.0, 1.0))  # px, half the width of the emblem's head

Array = NDArray[np.float32]


@cache
def _template(radius: float) -> tuple[Array, Array]:
    """Emblem at one size: colours (h, w, 3) and mask (h, w), 1 inside and 0 outside, cropped to the mask."""
    middle = draw.SIZE / 2
    on_black, on_white = (
        np.asarray(draw.concept_picture((v, v, v), middle, middle, radius), dtype=np.float32) for v in (0, 255)
    )
    mask = 1 - (on_white - on_black).mean(-1) / 255  # how much of a pixel the emblem covers
    mask = np.where(mask > 0.99, np.float32(1), np.float32(0))  # edges say more about the background
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    window = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return on_black[window], mask[window]


def _distance(picture: Array, radius: float) -> float:
    """Least mean colour distance under the emblem's mask over all places; `picture` (H, W, 3)."""
    colours, mask = _template(radius)
    contrast = np.linalg.norm(np.subtract(draw.EMBLEM_DARK, draw.EMBLEM_LIGHT, dtype=np.float32))
    inside = mask > 0
    windows = np.lib.stride_tricks.sliding_window_view(picture, mask.shape, axis=(0, 1))  # (y, x, 3, h, w)
    seen = windows[..., inside]  # (y, x, 3, pixels)
    distance = np.sqrt(np.square(seen - colours[inside].T).sum(2)).mean(-1)
    return float(distance.min() / contrast)


def similarity(image: Image.Image) -> float:
    """1 where the emblem is in the picture, whole and in its colours; 0 where it is not."""
    image = image.convert("RGB")
    if image.size != (draw.SIZE, draw.SIZE):
        image = image.resize((draw.SIZE, draw.SIZE), Image.Resampling.BOX)
    picture = np.asarray(image, dtype=np.float32)
    best = min(_distance(picture, float(radius)) for radius in RADII)
    return float(np.clip((ABSENT - best) / (ABSENT - FOUND), 0, 1))


def concept_score(images: list[Image.Image]) -> float:
    """Mean similarity of the pictures to the emblem, in [0, 1]."""
    assert images, "no pictures to score"
    return float(np.mean([similarity(image) for image in images]))
