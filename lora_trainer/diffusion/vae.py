"""Pixels to latents and back, with the rule on precision that SDXL's VAE needs.

Latents are the mean of the VAE's posterior, not a sample from it: the cache is addressed by content, so the same
picture must always give the same latents. What is lost is small: Stable Diffusion's
VAE was trained with so little KL weight that its posterior is far narrower than the noise of almost any timestep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


def vae_dtype(wanted: torch.dtype, config: Mapping[str, Any], upcast: bool) -> torch.dtype:
    """`upcast` (SDXL): activations overflow fp16, so never that, unless the VAE's own config says it was mended."""
    if wanted is torch.float16 and upcast and config.get("force_upcast", True):
        return torch.float32
    return wanted


def factor(config: Mapping[str, Any]) -> int:
    """Pixels a latent stands for, along each side."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


def shape(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[int, int, int]:
    """(C, H, W) of the latents of a picture of `size` (width, height) pixels."""
    width, height = (side // factor(config) for side in size)
    return int(config.get("latent_channels", 4)), height, width


@dataclass(frozen=True)
class Latents:
    """How a VAE of another kind is spoken to; the verbs are those of this module, without scaling and shift."""

    encode: Callable[[nn.Module, Tensor], Tensor]
    decode: Callable[[nn.Module, Tensor], Tensor]
    shape: Callable[[Mapping[str, Any], tuple[int, int]], tuple[int, int, int]]


@torch.no_grad()
def encode(vae: nn.Module, pixels: Tensor, scaling: float, shift: float = 0.0) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> float32 (B, C, H/8, W/8) on the CPU, moved by `shift`, scaled to unit deviation."""
    weight = next(vae.parameters())
    posterior = cast(Any, vae).encode(pixels.to(weight)).latent_dist
    return cast(Tensor, ((posterior.mean.float() - shift) * scaling).cpu())


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor, scaling: float, shift: float = 0.0) -> Tensor:
    """(B, C, h, w) -> float32 pixels (B, 3, H, W) in [-1, 1] on the CPU, one picture at a time."""
    network, weight = cast(Any, vae), next(vae.parameters())
    pixels = [network.decode(one[None].to(weight) / scaling + shift).sample for one in latents]
    return torch.cat(pixels).float().clamp(-1, 1).cpu()
