"""Aspect-ratio buckets, as pure functions: which size an image is trained at, and what is cut off to get there.

A bucket is any (width, height) with sides that are multiples of `step` and at most the area of the resolution. An
image is scaled to cover its bucket and cropped; it gets the bucket with the best `area * (1 - cropped share)**2`, that
is, nearly the full area, and a shape so close that little is lost. Without `upscale` only buckets that the image
covers as it is are candidates, so a small image lands in the largest bucket that fits it. Not done: a maximum number
of buckets.
"""

import functools
import math
from dataclasses import dataclass

from ..seam.family import Framing


@dataclass(frozen=True)
class BucketRule:
    resolution: tuple[int, int]
    step: int = 64
    upscale: bool = False
    enabled: bool = True
    """False: everything is cropped to the resolution itself."""

    @property
    def area(self) -> int:
        return self.resolution[0] * self.resolution[1]

    @property
    def longest(self) -> int:
        """Sides stop at twice the resolution's longer one: beyond that the model has seen nothing alike."""
        return max(self.step, 2 * max(self.resolution) // self.step * self.step)

    @property
    def fixed(self) -> tuple[int, int]:
        """The resolution, rounded down to the step."""
        width, height = (max(self.step, side // self.step * self.step) for side in self.resolution)
        return width, height


@dataclass(frozen=True)
class Fit:
    """How an image becomes its bucket's `target`: scaled to `resized`, then cropped. All (width, height) in pixels."""

    size: tuple[int, int]
    resized: tuple[int, int]
    target: tuple[int, int]

    @property
    def cropped(self) -> float:
        """Share of the image that is cut off."""
        return 1 - self.target[0] * self.target[1] / (self.resized[0] * self.resized[1])

    @property
    def slack(self) -> tuple[int, int]:
        return self.resized[0] - self.target[0], self.resized[1] - self.target[1]

    def framing(self, place: tuple[float, float] = (0.5, 0.5), flip: bool = False) -> Framing:
        """`place` in [0, 1]² says where the crop sits; a mirrored image counts its offset from the other side."""
        left, top = int(self.slack[0] * place[0]), int(self.slack[1] * place[1])
        return Framing(self.size, (self.slack[0] - left if flip else left, top), self.target)

    def box(self, place: tuple[float, float] = (0.5, 0.5)) -> tuple[float, float, float, float]:
        """The crop as fractions of the image's sides: left, top, right, bottom."""
        left, top = self.framing(place).crop
        (width, height), (w, h) = self.resized, self.target
        return left / width, top / height, (left + w) / width, (top + h) / height


def cover(size: tuple[int, int], target: tuple[int, int]) -> Fit:
    """Scale `size` just enough to cover `target`."""
    scale = max(target[0] / size[0], target[1] / size[1])
    width, height = (max(t, round(s * scale)) for s, t in zip(size, target, strict=True))
    return Fit(size, (width, height), target)


@functools.lru_cache(maxsize=65536)
def fit(size: tuple[int, int], rule: BucketRule) -> Fit | None:
    """The best bucket for an image of `size`; None if none can be filled without enlarging it."""
    if not rule.enabled:
        covers = size[0] >= rule.fixed[0] and size[1] >= rule.fixed[1]
        return cover(size, rule.fixed) if covers or rule.upscale else None
    best = max(((_score(size, target), target) for target in _candidates(size, rule)), default=None)
    return cover(size, best[1]) if best else None


def _score(size: tuple[int, int], target: tuple[int, int]) -> float:
    scale = max(target[0] / size[0], target[1] / size[1])
    area = target[0] * target[1]
    kept = area / (size[0] * size[1] * scale * scale)
    return area * min(1.0, kept) ** 2


def _candidates(size: tuple[int, int], rule: BucketRule) -> list[tuple[int, int]]:
    """For every width the two heights around the image's own shape: of all heights, one of these scores best."""
    widest = rule.longest if rule.upscale else min(rule.longest, size[0])
    found = []
    for width in range(rule.step, widest + 1, rule.step):
        highest = min(rule.longest, rule.area // width)
        if not rule.upscale:
            highest = min(highest, size[1])
        if highest < rule.step:
            continue
        ideal = width * size[1] / size[0] / rule.step
        for steps in {math.floor(ideal), math.ceil(ideal)}:
            height = min(max(1, steps), highest // rule.step) * rule.step
            found.append((width, height))
    return found
