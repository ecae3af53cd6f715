"""Qwen-Image's transformer: how to build it, and how to read it from a single file, whose names are diffusers' own."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor, nn

from ...bases.parts import Config
from ...bases.weights import Locate, Piece, Spelled
from ...files.kinds import Part, find_part

PATCH = 2


class Rotary(nn.Module):
    """Rotary positions of several axes, without a table: angles are made where they are wanted."""

    def __init__(self, axes: Sequence[int], theta: float = 10000.0) -> None:
        super().__init__()
        self.axes, self.theta = tuple(axes), theta

    def turned(self, places: Sequence[Tensor]) -> Tensor:
        """Places along each axis (…, tokens) -> complex (…, tokens, head / 2)."""
        axes = zip(places, self.axes, strict=True)
        angle = torch.cat([place.float()[..., None] * self._frequencies(axis, place.device) for place, axis in axes], -1)
        return torch.polar(torch.ones_like(angle), angle)

    def _frequencies(self, axis: int, device: torch.device) -> Tensor:
        return 1.0 / torch.pow(self.theta, torch.arange(0, axis, 2, device=device).to(torch.float32).div(axis))


class Positions(Rotary):
    """diffusers' QwenEmbedRope without the table that it keeps outside its state."""

    def forward(self, shapes: Any, device: torch.device, max_txt_seq_len: int) -> tuple[Tensor, Tensor]:
        """Complex (H · W, D/2) of the picture's tokens and (L, D/2) of the text's; shapes: [[(1, H, W)], …]."""
        [[(_, height, width)], *_] = shapes
        row, column = (torch.arange(side, device=device) - (side - side // 2) for side in (height, width))
        frame = torch.zeros(height * width, device=device, dtype=torch.int64)
        picture = (frame, row[:, None].expand(height, width).reshape(-1), column[None].expand(height, width).reshape(-1))
        text = torch.arange(max_txt_seq_len, device=device) + max(height // 2, width // 2)
        return self.turned(picture), self.turned((text,) * 3)


def build(config: Mapping[str, Any]) -> nn.Module:
    transformer: Any = QwenImageTransformer2DModel.from_config(dict(config))
    transformer.pos_embed = Positions(transformer.config.axes_dims_rope)
    return cast(nn.Module, transformer)


def derive(header: Any, standard: Config) -> tuple[Config, Locate]:
    """Config and places of a transformer in a single file; its original names are diffusers'."""
    part = find_part(header, "img_in.weight") or Part(header, "")
    file = Spelled(header, lambda name: [Piece(part.key(name))])
    width, channels = file.sides("img_in")
    head = (file.shape("transformer_blocks.0.attn.norm_q.weight") or (int(standard["attention_head_dim"]),))[0]
    config = standard | {
        "in_channels": channels, "out_channels": file.sides("proj_out")[0] // PATCH**2,
        "num_layers": file.count("transformer_blocks.{}.attn.to_q.weight"), "joint_attention_dim": file.sides("txt_in")[1],
        "attention_head_dim": head, "num_attention_heads": max(1, width // head),
        "axes_dims_rope": [axis * head // 128 for axis in standard["axes_dims_rope"]],
        "zero_cond_t": "__index_timestep_zero__" in file,
        "use_additional_t_cond": "time_text_embed.addition_t_embedding.weight" in file,
    }  # fmt: skip
    return config, file.locate
