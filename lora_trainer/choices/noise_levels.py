"""Which t in (0, 1] rectified flow is trained at, before the shift (Esser et al. 2024, section 3.1)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import Row, table

if TYPE_CHECKING:
    from torch import Tensor

PARABOLA = 7.7
"""Chroma's reference training script draws t with the density 2 - 7.7 (t - 1/2)^2."""


@dataclass(frozen=True)
class Sampling(Row):
    level: "Callable[..., Tensor]"
    """(a random number, shape (); what it reads) -> t."""
    normal: bool = False
    """The number is of the standard normal distribution, else uniform in [0, 1)."""


def _uniform(u: "Tensor") -> "Tensor":
    return 1 - u  # never 0, where there is nothing to learn


def _logit_normal(x: "Tensor", logit_mean: float, logit_std: float) -> "Tensor":
    return (logit_mean + logit_std * x).sigmoid()


def _mode(u: "Tensor", mode_scale: float) -> "Tensor":
    """Equation 20: the scale moves weight to the middle."""
    return 1 - u - mode_scale * ((math.pi * u / 2).cos() ** 2 - 1 + u)


def _parabola(u: "Tensor") -> "Tensor":
    """The t below which a share 1 - u of the parabola lies: the middle root of a cubic, by Viete's formula.

    With d = t - 1/2 the area is 2 d - (a / 3) d^3, so d^3 - p d + q = 0 with p = 6 / a and q = 3 (area) / a.
    """
    half = 1 - PARABOLA / 24  # area from the middle to either end
    p, q = 6 / PARABOLA, 3 * (2 * (1 - u).double() - 1) * half / PARABOLA
    return (0.5 + 2 * math.sqrt(p / 3) * ((1.5 * q / p * math.sqrt(3 / p)).asin() / 3).sin()).float()


SAMPLINGS = table(
    Sampling("uniform", _uniform, pt=("uniforme",)),
    Sampling("logit_normal", _logit_normal, reads=("logit_mean", "logit_std"), normal=True),
    Sampling("mode", _mode, pt=("moda",), reads=("mode_scale",)),
    Sampling("parabola", _parabola, pt=("parábola",)),
)
