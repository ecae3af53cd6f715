"""Rectified flow (Liu et al. 2022; Esser et al. 2024, "Scaling rectified flow transformers"): straight paths to noise.

x_t = (1 - t) x0 + t · noise with t in (0, 1], and the network answers the path's velocity, noise - x0. What differs between
runs is which t are drawn (section 3.1 of the latter paper), how far they are shifted towards noise for larger pictures
(section 5.3.2), and how errors count. Timesteps are 1000 t, diffusers' scale. Left out: the losses of distilled models.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..choices.losses import WEIGHTINGS
from ..choices.noise_levels import SAMPLINGS
from .objective import Objective

SCALE = 1000.0
"""Timesteps of pure noise, as diffusers counts them."""


@dataclass(frozen=True)
class Shift:
    """t -> s t / (1 + (s - 1) t): what s noise levels are to a picture of more pixels.

    `fixed` is s itself; without it, log s grows on a line with the picture's tokens, as FLUX was trained.
    """

    fixed: float | None = None
    patch: int = 2
    """Latent pixels that a token covers, along each side."""
    tokens: tuple[int, int] = (256, 4096)
    """Ends of the line."""
    logs: tuple[float, float] = (0.5, 1.15)
    """log s at its ends: the scheduler's base_shift and max_shift."""

    @classmethod
    def of(cls, schedule: Mapping[str, Any], patch: int, asked: float | Literal["auto", "resolution"] = "auto") -> "Shift":
        """From a diffusers scheduler_config.json; `asked` goes before it."""
        dynamic = asked == "resolution" or (asked == "auto" and bool(schedule.get("use_dynamic_shifting")))
        fixed = None if dynamic else float(schedule.get("shift", 1.0)) if asked == "auto" else float(asked)
        return cls(
            fixed,
            patch,
            (int(schedule.get("base_image_seq_len", 256)), int(schedule.get("max_image_seq_len", 4096))),
            (float(schedule.get("base_shift", 0.5)), float(schedule.get("max_shift", 1.15))),
        )

    def mu(self, shape: torch.Size) -> float:
        """log s of latents shaped (…, H, W): diffusers' calculate_shift."""
        if self.fixed is not None:
            return math.log(self.fixed)
        count = (shape[-2] // self.patch) * (shape[-1] // self.patch)
        slope = (self.logs[1] - self.logs[0]) / (self.tokens[1] - self.tokens[0])
        return count * slope + self.logs[0] - slope * self.tokens[0]

    def __call__(self, t: Tensor, shape: torch.Size) -> Tensor:
        s = math.exp(self.mu(shape))
        return s * t / (1 + (s - 1) * t)


@dataclass(frozen=True, eq=False, kw_only=True)
class RectifiedFlow(Objective):
    shift: Shift = Shift(1.0)
    sampling: str = "logit_normal"
    """One of choices/noise_levels.py."""
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    timestep_range: tuple[int, int] = (0, 1000)
    """What is drawn is squeezed into it."""
    weighting: str = "none"
    """One of choices/losses.py."""

    def sample_t(self, rng: torch.Generator, shape: torch.Size) -> Tensor:
        low, high = (end / SCALE for end in self.timestep_range)
        return SCALE * (low + (high - low) * self.shift(self._unshifted(rng), shape))

    def _unshifted(self, rng: torch.Generator) -> Tensor:
        sampling = SAMPLINGS[self.sampling]
        number = (torch.randn if sampling.normal else torch.rand)((), generator=rng)
        return sampling.level(number, **sampling.arguments(self))

    def corrupt(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        t = (timesteps / SCALE).view(-1, *[1] * (x0.ndim - 1)).to(x0)
        return (1 - t) * x0 + t * noise, noise - x0

    def weight(self, timesteps: Tensor) -> Tensor:
        return WEIGHTINGS[self.weighting].of(timesteps / SCALE)
