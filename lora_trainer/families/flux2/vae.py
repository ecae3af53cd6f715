"""FLUX.2's VAE: 2 x 2 pixels of its 32 channels are one latent of 128, brought to mean 0 and deviation 1 by fixed statistics.

The statistics are those of a batch norm that never runs; all as diffusers' Flux2Pipeline does it. So latents are a sixteenth of
the picture along each side, and the transformer's tokens are single ones. Files are Black Forest Labs' or diffusers'.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...bases import architecture, single_file
from ...bases.parts import Config, Slot
from ...bases.weights import Locate, Piece
from ...config.names import shown
from ...diffusion import vae as _vae
from ...errors import SourceError, t
from ...files import kinds
from ...files.kinds import Part

PATCH = 2
CELL = PATCH**2
_INSIDE = {"quant_conv": "encoder.quant_conv", "post_quant_conv": "decoder.post_quant_conv"}
"""Where Black Forest Labs have the two convolutions at the latents."""


def build(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import AutoencoderKLFlux2  # not in every version that the rest works with

    vae = AutoencoderKLFlux2.from_config({key: value for key, value in config.items() if key != "force_upcast"})
    vae.bn.num_batches_tracked = None  # nobody reads it, and not every file has it
    return cast(nn.Module, vae)


def describe(part: Part, standard: Config) -> tuple[Config, Locate]:
    if "bn.running_mean" not in part:
        raise SourceError(
            t(pt="este VAE não é o do FLUX.2 (não traz as estatísticas bn)",
              en="this VAE is not FLUX.2's (it lacks the bn statistics)"),
            t(pt="dê o flux2-vae.safetensors", en="give flux2-vae.safetensors"),
            shown("model", "vae"),
        )  # fmt: skip
    if "encoder.down.0.block.0.conv1.weight" not in part:
        config = architecture.derive_diffusers_vae(Part(part.header, ""), standard)
        widths = _widths(part, "decoder.up_blocks.{}.resnets.0.conv1.weight")[::-1]
        return _with_decoder(config, widths), single_file.locate_diffusers_vae
    config = architecture.derive_vae(part, standard)
    for layer, inside in _INSIDE.items():
        config[f"use_{layer}"] = f"{inside}.weight" in part or f"{layer}.weight" in part
    widths = _widths(part, "decoder.up.{}.block.0.conv1.weight")
    return _with_decoder(config, widths), locate_original(part, config)


def _widths(part: Part, pattern: str) -> list[int]:
    return [(part.shape(pattern.format(level)) or (0,))[0] for level in range(part.count(pattern))]


def _with_decoder(config: Config, widths: list[int]) -> Config:
    """There is a release with a narrower decoder."""
    return config if widths == config["block_out_channels"] else config | {"decoder_block_out_channels": widths}


def locate_original(part: Part, config: Mapping[str, Any]) -> Locate:
    usual = single_file.locate_vae(part, config)

    def pieces(name: str) -> list[Piece]:
        layer, _, leaf = name.rpartition(".")
        return [*([Piece(part.key(f"{_INSIDE[layer]}.{leaf}"))] if layer in _INSIDE else []), *usual(name)]

    return pieces


VAE = Slot(
    "vae", kinds.VAE, "VAE (flux2-vae.safetensors)", ("vae.",), build, describe, single_file.locate_diffusers_vae,
)  # fmt: skip


# -- latents


def encode(vae: nn.Module, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> float32 (B, 4C, H/16, W/16) on the CPU."""
    mean, deviation = _statistics(vae, torch.device("cpu"))
    return (patchify(_vae.encode(vae, pixels, 1.0)) - mean) / deviation


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """The inverse; float32 pixels in [-1, 1] on the CPU."""
    mean, deviation = _statistics(vae, latents.device)
    return _vae.decode(vae, unpatchify(latents.float() * deviation + mean), 1.0)


def _statistics(vae: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation (1, 4C, 1, 1), float32."""
    network: Any = vae
    mean, variance = (value.to(device).float().view(1, -1, 1, 1) for value in (network.bn.running_mean, network.bn.running_var))
    return mean, (variance + float(network.config.batch_norm_eps)).sqrt()


def patchify(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, 4C, H/2, W/2)."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cells.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * CELL, height // PATCH, width // PATCH)


def unpatchify(latents: Tensor) -> Tensor:
    """The inverse."""
    batch, channels, height, width = latents.shape
    cells = latents.reshape(batch, channels // CELL, PATCH, PATCH, height, width)
    return cells.permute(0, 1, 4, 2, 5, 3).reshape(batch, channels // CELL, height * PATCH, width * PATCH)


def shape(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[int, int, int]:
    """(4C, H, W) of the latents of a picture of `size` (width, height) pixels."""
    channels, height, width = _vae.shape(config, size)
    return channels * CELL, height // PATCH, width // PATCH


LATENTS = _vae.Latents(encode, decode, shape)
