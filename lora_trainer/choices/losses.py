"""How the error of one number counts, and how an example's error counts by its noise level."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import Row, table

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_T = 1e-3
"""Where a weight would be endless."""


@dataclass(frozen=True)
class Loss(Row):
    function: str
    """In torch.nn.functional."""
    bound: str = ""
    """Its argument for training.huber_delta: below it the function is half a square."""


@dataclass(frozen=True)
class Weighting(Row):
    of: "Callable[[Tensor], Tensor]"
    """t in (0, 1], shape (B,) -> weights (B,)."""


def _none(t: "Tensor") -> "Tensor":
    return t.new_ones(t.shape)


def _sigma_sqrt(t: "Tensor") -> "Tensor":
    return t.clamp(min=SMALLEST_T) ** -2


def _cosmap(t: "Tensor") -> "Tensor":
    """Esser et al. 2024, equation 21."""
    return 2 / (math.pi * (1 - 2 * t + 2 * t**2))


LOSSES = table(
    Loss("l2", "mse_loss"),
    Loss("huber", "huber_loss", bound="delta"),
    Loss("smooth_l1", "smooth_l1_loss", bound="beta"),
)
WEIGHTINGS = table(
    Weighting("none", _none, pt=("nenhum", "nao", "não", "no")),
    Weighting("sigma_sqrt", _sigma_sqrt),
    Weighting("cosmap", _cosmap),
)
