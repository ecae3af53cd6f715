"""PixArt's transformer: diffusers' own, without its table of positions, which no file has: they are made when they are wanted."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from diffusers import PixArtTransformer2DModel
from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed
from torch import Tensor, nn


class Positions(PatchEmbed):
    def forward(self, latent: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H/2 · W/2, D)."""
        rows, columns = (side // self.patch_size for side in latent.shape[-2:])
        tokens: Tensor = self.proj(latent).flatten(2).transpose(1, 2)
        width, device = tokens.shape[-1], latent.device
        places = get_2d_sincos_pos_embed(
            width, (rows, columns), base_size=self.base_size, interpolation_scale=self.interpolation_scale, device=device
        )
        return (tokens + places.float()[None]).to(tokens.dtype)


def build(config: Mapping[str, Any]) -> nn.Module:
    known = inspect.signature(PixArtTransformer2DModel).parameters  # released configs are of an older, larger class
    transformer: Any = PixArtTransformer2DModel.from_config({name: config[name] for name in known if name in config})
    own = transformer.pos_embed
    transformer.pos_embed = Positions(
        transformer.config.sample_size, transformer.config.sample_size, own.patch_size, transformer.config.in_channels,
        transformer.inner_dim, interpolation_scale=own.interpolation_scale, pos_embed_type=None,
    )  # fmt: skip
    return cast(nn.Module, transformer)


def sizes(latents: Tensor) -> dict[str, Tensor]:
    """The picture's height and width (B, 2) in pixels, and their ratio (B, 1)."""
    height, width = (8 * side for side in latents.shape[-2:])
    resolution = torch.tensor([[height, width]], device=latents.device).expand(len(latents), 2)
    ratio = torch.tensor([[height / width]], device=latents.device).expand(len(latents), 1)
    return {"resolution": resolution.to(latents.dtype), "aspect_ratio": ratio.to(latents.dtype)}
