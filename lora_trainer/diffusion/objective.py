"""What a diffusion model is trained to predict, from which noise, and how its error counts.

An `Objective` knows how latents are noised and what the network should answer; the loss is in `diffusion.py`.
Another noise process (rectified_flow.py) is another subclass with the same three verbs: sample_t, corrupt, weight.
Left out: multi-resolution noise, per-step huber schedules, learned weightings.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..choices.losses import LOSSES


@dataclass(frozen=True, eq=False)
class Objective(ABC):
    """Timesteps are (B,) on the scale the network was trained with, and stay on the CPU until the network is called."""

    noise_offset: float = 0.0
    loss: str = "l2"
    """One of choices/losses.py."""
    huber_delta: float = 0.1
    unmasked_weight: float = 0.0

    @abstractmethod
    def sample_t(self, rng: torch.Generator, shape: torch.Size) -> Tensor:
        """One example's timestep, shape (); its latents are of `shape` (C, H, W)."""

    @abstractmethod
    def corrupt(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy latents and the regression target, each shaped like x0 (B, C, H, W)."""

    @abstractmethod
    def weight(self, timesteps: Tensor) -> Tensor:
        """(B,) weight of each example's error."""

    def draw(self, seeds: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Timesteps (B,) and noise shaped (B, C, H, W), on the CPU.

        One generator per example: an example meets the same noise in whatever batch, on whatever device.
        """
        timesteps, noise = [], []
        for seed in seeds.tolist():
            rng = torch.Generator().manual_seed(seed)
            timesteps.append(self.sample_t(rng, shape[1:]))
            white = torch.randn(shape[1:], generator=rng)
            if self.noise_offset:
                # Guttenberg 2023, "Diffusion with offset noise": lets the mean brightness be learnt.
                white = white + self.noise_offset * torch.randn(shape[1], 1, 1, generator=rng)
            noise.append(white)
        return torch.stack(timesteps), torch.stack(noise)

    def error(self, prediction: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,) mean error of each example; `mask` is (B, 1, H, W) in [0, 1].

        Dividing by the mask's own mean keeps a small subject as loud as a whole picture; an all-black mask gives 0.
        """
        each = self._elementwise(prediction, target)
        if mask is None:
            return each.flatten(1).mean(1)
        share = self.unmasked_weight + (1 - self.unmasked_weight) * mask.to(each)
        covered = share.flatten(1).mean(1)
        return (each * share).flatten(1).mean(1) / covered.clamp(min=torch.finfo(each.dtype).tiny)

    def _elementwise(self, prediction: Tensor, target: Tensor) -> Tensor:
        loss = LOSSES[self.loss]
        function: Callable[..., Tensor] = getattr(F, loss.function)
        if not loss.bound:
            return function(prediction, target, reduction="none")
        # Half a square near zero: doubled, a small error costs what l2 makes it cost.
        return 2 * function(prediction, target, reduction="none", **{loss.bound: self.huber_delta})


@dataclass(frozen=True, eq=False, kw_only=True)
class NoisePrediction(Objective):
    """The variance-preserving process of DDPM (Ho et al. 2020), predicting epsilon or v (Salimans & Ho 2022, app. D).

    SNR = alphas_cumprod / (1 - alphas_cumprod). The error of v is that of epsilon divided by alphas_cumprod =
    SNR / (SNR + 1), so a weight for v is the weight for epsilon times SNR / (SNR + 1): the same training either way.
    """

    alphas_cumprod: Tensor
    prediction_type: Literal["epsilon", "v_prediction"] = "epsilon"
    timestep_range: tuple[int, int] = (0, 1000)
    """First and one past the last timestep drawn."""
    min_snr_gamma: float | None = None
    debiased: bool = False

    def sample_t(self, rng: torch.Generator, shape: torch.Size) -> Tensor:
        return torch.randint(*self.timestep_range, (), generator=rng)

    def corrupt(self, x0: Tensor, noise: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.alphas_cumprod[timesteps].view(-1, 1, 1, 1)
        signal, spread = kept.sqrt().to(x0), (1 - kept).sqrt().to(x0)
        x_t = signal * x0 + spread * noise
        return x_t, noise if self.prediction_type == "epsilon" else signal * noise - spread * x0

    def weight(self, timesteps: Tensor) -> Tensor:
        kept = self.alphas_cumprod[timesteps]
        snr = kept / (1 - kept)
        if self.min_snr_gamma is not None:
            # Hang et al. 2023, sec. 3.4: min(SNR, gamma)/SNR, written so that SNR = 0 gives 1 and not 0/0.
            weight = (self.min_snr_gamma / snr).clamp(max=1.0)
        elif self.debiased:
            # Yu et al. 2023, "Debias the training of diffusion models": 1/sqrt(SNR). Endless at SNR = 0, hence the
            # floor, which only schedules rescaled to zero terminal SNR reach.
            weight = snr.clamp(min=1e-4).rsqrt()
        else:
            return torch.ones_like(snr)
        return weight if self.prediction_type == "epsilon" else weight * kept


def alphas_cumprod(schedule: dict[str, Any], zero_terminal_snr: bool) -> Tensor:
    """(N,) float32, from the entries of a diffusers scheduler_config.json (rescaling: Lin et al. 2023, algorithm 1)."""
    from diffusers import DDPMScheduler

    known = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
    chosen = {name: schedule[name] for name in known if schedule.get(name) is not None}
    rescale = zero_terminal_snr or bool(schedule.get("rescale_betas_zero_snr"))
    return DDPMScheduler(**chosen, rescale_betas_zero_snr=rescale).alphas_cumprod
