"""SD3's transformer: diffusers' own, with its table of positions in host memory."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import PatchEmbed
from torch import Tensor, nn

from ...engine.tracker import count_transfer, host_memory


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
