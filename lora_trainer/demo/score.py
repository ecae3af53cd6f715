"""How well pictures show the "ohwx" emblem, as a number from 0 to 1 that needs no judge.

Masked template matching in colour: the emblem, drawn at several sizes, is laid over every place of the picture, and
the mean colour distance under its mask is measured; the best place counts. The distance is divided by that between the
emblem's two colours, so a flat patch in either of them, or a picture without the emblem, is near 0.5 or above. The
similarity falls linearly from 1 at `FOUND` to 0 at `ABSENT`, and the score is its mean over the pictures.

The measurement of a LoRA is fixed here too: the prompts, the guidance, the steps and the seed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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

SIZE = 64  # px, both sides of a picture
FOUND, ABSENT = 0.15, 0.42  # relative colour distances; see README.md for where they come from
Array = NDArray[np.float32]


@cache
def _emblem() -> dict[str, Array]:
    """`contrast` between its two colours; for each size its colours (h, w, 3) and mask (h, w), as tools/make_demo draws it."""
    with np.load(Path(__file__).with_name("emblem.npz")) as stored:
        return dict(stored)


def _distance(picture: Array, colours: Array, mask: Array) -> float:
    """Least mean colour distance under the emblem's mask over all places; `picture` (H, W, 3)."""
    inside = mask > 0
    windows = np.lib.stride_tricks.sliding_window_view(picture, mask.shape, axis=(0, 1))  # (y, x, 3, h, w)
    seen = windows[..., inside]  # (y, x, 3, pixels)
    distance = np.sqrt(np.square(seen - colours[inside].T).sum(2)).mean(-1)
    return float(distance.min() / _emblem()["contrast"])


def similarity(image: Image.Image) -> float:
    """1 where the emblem is in the picture, whole and in its colours; 0 where it is not."""
    image = image.convert("RGB")
    if image.size != (SIZE, SIZE):
        image = image.resize((SIZE, SIZE), Image.Resampling.BOX)
    picture = np.asarray(image, dtype=np.float32)
    emblem = _emblem()
    sizes = (name.removeprefix("mask_") for name in emblem if name.startswith("mask_"))
    best = min(_distance(picture, emblem[f"colours_{size}"], emblem[f"mask_{size}"]) for size in sizes)
    return float(np.clip((ABSENT - best) / (ABSENT - FOUND), 0, 1))


def concept_score(images: list[Image.Image]) -> float:
    """Mean similarity of the pictures to the emblem, in [0, 1]."""
    assert images, "no pictures to score"
    return float(np.mean([similarity(image) for image in images]))
