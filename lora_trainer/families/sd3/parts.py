"""What an SD3 base is made of besides its transformer's names: the files of its encoders and VAE, and a smaller transformer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import PatchEmbed
from torch import Tensor, nn

from ...bases import architecture, single_file
from ...bases.components import Networks
from ...bases.parts import CLIP_L, T5_XXL, VAE, Config, Slot
from ...bases.weights import Locate
from ...engine.tracker import count_transfer, host_memory
from ...errors import SourceError, t
from ...files.kinds import CLIP_G as CLIP_G_FILE
from ...files.kinds import Part

FLUX_SCALING = 0.3611
"""Of another VAE with the same shapes."""


def _describe_clip_g(part: Part, standard: Config) -> tuple[Config, Locate]:
    config, locate = architecture.derive_clip(part, standard), single_file.locate_clip(part)
    projection = next((shape for name in ("", "transformer.") if (shape := part.shape(f"{name}text_projection.weight"))), None)
    return config | ({"projection_dim": projection[0]} if projection else {}), locate


CLIP_G = replace(
    CLIP_L, part="text_encoder_2", kind=CLIP_G_FILE, title="CLIP-G (clip_g.safetensors)",
    prefixes=("text_encoders.clip_g.",), describe=_describe_clip_g,
)  # fmt: skip
SLOTS: tuple[Slot, ...] = (
    CLIP_L, CLIP_G, replace(T5_XXL, part="text_encoder_3", optional=True), replace(VAE, title="VAE (sd3_vae.safetensors)")
)  # fmt: skip


class Positions(PatchEmbed):
    """3.5-medium's table is 432 MiB in 16 bits, of which a picture wants a crop: it stays in host memory."""

    home = torch.device("cpu")

    def cropped_pos_embed(self, height: int, width: int) -> Tensor:
        with host_memory():
            crop: Tensor = super().cropped_pos_embed(height, width)
        count_transfer(crop.nbytes)
        return crop.to(self.proj.weight.device, copy=True)


def build(config: Mapping[str, Any]) -> nn.Module:
    transformer: Any = SD3Transformer2DModel.from_config(dict(config))
    known = transformer.config
    transformer.pos_embed = Positions(
        known.sample_size, known.sample_size, known.patch_size, known.in_channels, transformer.inner_dim,
        pos_embed_max_size=known.pos_embed_max_size,
    )  # fmt: skip
    return cast(nn.Module, transformer)


def refuse_flux_vae(networks: Networks) -> None:
    """Its shapes are those of SD3's, its latents are not; only a config tells."""
    vae = networks.components["vae"]
    if abs(float(vae.config["scaling_factor"]) - FLUX_SCALING) < 1e-4:
        raise SourceError(
            t(pt="este VAE é o do FLUX: as formas são iguais às do SD3, os latentes não",
              en="this VAE is FLUX's: its shapes are those of SD3's, its latents are not"),
            t(pt="dê o VAE do SD3", en="give SD3's VAE"),
            vae.what,
        )  # fmt: skip
