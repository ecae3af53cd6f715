"""Drawing images with the model in training, for previews: DDIM, or Euler steps along a rectified flow.

Noise comes from the seed and the image's index alone, so base and adapter draw from the same noise and training's random
numbers are not touched. Guidance is classifier-free, but for distilled models, to which it is told: two passes one after the
other, since one of both would need more memory than a step of training.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..engine.host import compute_device
from ..seam.family import Batch, Example, Sampling
from .prompts import collate


class Drawn(Protocol):
    """What drawing asks of a family (diffusion.py says what each is)."""

    schedule_config: dict[str, Any]
    distilled: bool
    last_level: float | None
    levels: Sequence[float] | None

    @property
    def prediction_type(self) -> str: ...
    @property
    def zero_terminal_snr(self) -> bool: ...
    def sampling_mu(self, steps: int, shape: torch.Size) -> float: ...
    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor: ...
    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor: ...
    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch: ...


def make_scheduler(family: Drawn, zero_terminal_snr: bool = False) -> DDIMScheduler:
    """DDIM on the family's noise schedule, from the last timestep down (Lin et al. 2023, table 2: "trailing")."""
    keys = ("beta_start", "beta_end", "beta_schedule", "num_train_timesteps")
    return DDIMScheduler(
        **{key: family.schedule_config[key] for key in keys if key in family.schedule_config},
        prediction_type=family.prediction_type,
        clip_sample=False,
        set_alpha_to_one=False,
        timestep_spacing="trailing",
        rescale_betas_zero_snr=zero_terminal_snr,
    )


def make_flow_scheduler(family: Drawn, steps: int, shape: torch.Size) -> FlowMatchEulerDiscreteScheduler:
    """As the families' pipelines set it: evenly spaced levels, shifted for latents of `shape` (…, H, W)."""
    known = {key: value for key, value in family.schedule_config.items() if not key.startswith("_")}
    if steps == 1:
        known.pop("shift_terminal", None)  # stretches what lies between the first level and the last, which are one: 0 / 0
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(known)
    mu = family.sampling_mu(steps, shape) if scheduler.config.use_dynamic_shifting else None
    last = 1 / steps if family.last_level is None else family.last_level
    distilled = family.levels is not None and len(family.levels) == steps
    levels = family.levels if distilled else np.linspace(1.0, last, steps).tolist()
    scheduler.set_timesteps(sigmas=levels, mu=mu)
    scheduler.set_begin_index(0)
    return scheduler


@torch.no_grad()
def sample_latents(
    family: Drawn,
    model: nn.ModuleDict,
    positive: Sequence[Example],
    negative: Example,
    sampling: Sampling,
) -> Tensor:
    """Clean latents (N, C, h, w) for N prompts, on the model's device."""
    device = compute_device(model)
    shape = family.example_batch(1, sampling.size)["latents"].shape[1:]
    noise = torch.stack([_noise(shape, sampling.seed + index) for index in range(len(positive))])
    parts = []
    for start in range(0, len(positive), sampling.chunk):
        chosen = positive[start : start + sampling.chunk]
        x_t = noise[start : start + sampling.chunk].to(device)
        sides = _batch(chosen, device), _batch([negative] * len(chosen), device)
        parts.append(_denoise(family, model, x_t, *sides, sampling))
    return torch.cat(parts)


def _denoise(
    family: Drawn,
    model: nn.ModuleDict,
    x_t: Tensor,
    positive: Example,
    negative: Example,
    sampling: Sampling,
) -> Tensor:
    with unset_fake_temporarily():  # its timesteps decide the flow, so they are real in a simulation too
        scheduler: Any
        if family.prediction_type == "flow":
            scheduler = make_flow_scheduler(family, sampling.steps, x_t.shape)
        else:
            scheduler = make_scheduler(family, family.zero_terminal_snr)
            scheduler.set_timesteps(sampling.steps)
    if family.distilled:
        positive = {**positive, "guidance": torch.full((len(x_t),), sampling.guidance, device=x_t.device)}
    for timestep in scheduler.timesteps.tolist():
        at = torch.full((len(x_t),), timestep, device=x_t.device)
        predicted = family.predict(model, x_t, at, positive).float()
        if sampling.guidance > 1 and not family.distilled:
            without = family.predict(model, x_t, at, negative).float()
            predicted = family.guide(predicted, without, sampling.guidance)
        x_t = cast(Tensor, scheduler.step(predicted, timestep, x_t).prev_sample)
    return x_t


def _noise(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _batch(examples: Sequence[Example], device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in collate(examples).items()}
