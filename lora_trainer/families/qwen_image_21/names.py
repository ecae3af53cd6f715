"""Qwen-Image 2.1's transformer for text alone: diffusers' layers, worked through without its masks and tables.

One stream: the caption, which looks back only and is always at noise level 0, then the picture, which looks at everything.
So a block is two attentions and two modulations, one for each part of the stream; diffusers lays the same out token by token,
for pictures between the words. A caption counts its own length in a batch too, padding or not, as it does alone.
In a single file gate and value of the MLP may be one matrix, as ComfyUI keeps them. Needs diffusers 0.41.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21TransformerBlock
from torch import Tensor, nn

from ...bases.originals import Original, spelled
from ...bases.parts import Config
from ...bases.weights import Locate
from ..qwen_image.names import Rotary

SHRUNK = 2.0**-5
_FUSED = "transformer_blocks.{}.img_mlp.gate_up.weight"
QWEN_21 = Original(
    "convert_qwen_image21_transformer_checkpoint_to_diffusers", (_FUSED,), tuple(_FUSED.format(block) for block in (0, 1))
)


class PictureTransformer(QwenImage21Transformer2DModel):
    def forward(self, picture: Tensor, timestep: Tensor, text: Tensor, mask: Tensor | None, size: tuple[int, int]) -> Tensor:
        """Answer (B, H · W, C) for latents (B, H · W, C) at noise levels (B,), beside captions (B, L, D) with their mask (B, L)."""
        count, length = text.shape[:2]
        picture, text = self.img_in(picture), self.txt_in(text)
        timestep = torch.cat([timestep, timestep.new_zeros(1)])
        noise = self.time_text_embed(timestep, picture)
        modulation, rotation = self.modulation(noise), self.pos_embed(length, mask, size, picture.device)
        seen = None if mask is None else torch.cat([mask.bool(), mask.new_ones(count, picture.shape[1], dtype=torch.bool)], 1)
        x = torch.cat([text, picture], 1)
        x = x.float() if x.dtype is torch.float16 else x  # whose largest number the sum of all blocks may pass
        for block in self.transformer_blocks:
            x = block(x, modulation, rotation, length, seen)
        scale = self.norm_out.linear(self.norm_out.silu(noise[:-1]))
        return cast(Tensor, self.proj_out((self.norm_out.norm(x[:, length:]) * (1 + scale[:, None])).to(picture.dtype)))


class Block(QwenImage21TransformerBlock):
    def forward(self, x: Tensor, modulation: Tensor, rotation: Tensor, length: int, seen: Tensor | None) -> Tensor:
        """x (B, L + H · W, D), of which `length` are the caption's; modulation (B + 1, 4 D), the last row that of level 0."""
        scale, gate, mlp_scale, mlp_gate = modulation.chunk(4, -1)
        inside = _times(self.img_norm1(x), 1 + scale, length).to(modulation.dtype)
        x = x + _times(attend(self.attn, inside, rotation, length, seen), gate.tanh(), length)
        inside = _times(self.img_norm2(x), 1 + mlp_scale, length).to(modulation.dtype)
        return x + _times(feed_forward(self.img_mlp, inside), mlp_gate.tanh(), length)


def _times(x: Tensor, rows: Tensor, length: int) -> Tensor:
    """The caption (first `length` tokens) by the last row, each picture by its own."""
    return torch.cat([x[:, :length] * rows[-1], x[:, length:] * rows[:-1, None]], 1)


def attend(attention: Any, x: Tensor, rotation: Tensor, length: int, seen: Tensor | None) -> Tensor:
    """`seen` (B, L + H · W): tokens that are no padding. After a caption, where it stands, none of it is seen by the caption."""
    head = attention.inner_dim // attention.heads
    q, k, v = (layer(x).unflatten(-1, (-1, head)) for layer in (attention.to_q, attention.to_k, attention.to_v))
    q, k = (rotated(norm(part).to(v.dtype), rotation) for norm, part in ((attention.norm_q, q), (attention.norm_k, k)))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, heads, tokens, head)
    words = F.scaled_dot_product_attention(q[:, :, :length], k[:, :, :length], v[:, :, :length], is_causal=True)
    mask = None if seen is None else seen[:, None, None]
    picture = F.scaled_dot_product_attention(q[:, :, length:], k, v, attn_mask=mask)
    joined = torch.cat([words, picture], 2).transpose(1, 2).flatten(2).type_as(x)
    return _enlarged(attention.to_out[0](_shrunk(joined, x)), x)


def feed_forward(mlp: Any, x: Tensor) -> Tensor:
    return _enlarged(mlp.out(_shrunk(mlp.activation_fn(mlp.gate_layer(x)), x) * mlp.proj(x)), x)


def _shrunk(inner: Tensor, x: Tensor) -> Tensor:
    """Before the last layer of each half, in fp16, whose largest number the layer's answer may pass."""
    return inner * SHRUNK if x.dtype is torch.float16 else inner


def _enlarged(answer: Tensor, x: Tensor) -> Tensor:
    """To float32 and its own size. A power of two, so nothing is rounded."""
    return answer.float() / SHRUNK if x.dtype is torch.float16 else answer


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """x (B, tokens, heads, head), by complex (B, tokens, head / 2): numbers side by side turn together."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, :, None]).flatten(3).type_as(x)


class Positions(Rotary):
    """QwenImage21Rope without its tables. Words count along all three axes; the picture stands behind the last word on the
    first, and its rows and columns are counted from its middle."""

    def forward(self, length: int, mask: Tensor | None, size: tuple[int, int], device: torch.device) -> Tensor:
        """Complex (B, L + H · W, head / 2); B is 1 where all captions are `length` long."""
        height, width = size
        words = torch.arange(length, device=device)
        lengths = words.new_full((1,), length) if mask is None else mask.sum(1).to(device)
        row, column = (torch.arange(side, device=device) - (side - side // 2) for side in size)
        grid = (row[:, None].expand(height, width).reshape(-1), column[None].expand(height, width).reshape(-1))
        count = len(lengths)
        places = [lengths[:, None].expand(count, height * width), *(places.expand(count, -1) for places in grid)]
        return self.turned([torch.cat([words.expand(count, length), place], 1) for place in places])


class NoiseLevel(nn.Module):
    """QwenImage21TemporalTimesteps without its table, which would be cast with the model, or left on meta."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, level: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.arange(half, dtype=torch.float32, device=level.device)
        angle = 1000 * level.float()[:, None] * torch.exp(-math.log(10000) * steps / half)
        return torch.cat([angle.cos(), angle.sin()], -1)


def build(config: Mapping[str, Any]) -> nn.Module:
    transformer: Any = PictureTransformer.from_config(dict(config))
    transformer.pos_embed = Positions(transformer.config.axes_dims_rope)
    embedding = transformer.time_text_embed
    embedding.time_proj = NoiseLevel(embedding.time_proj.timestep_dim)
    for block in transformer.transformer_blocks:
        block.__class__ = Block  # the same layers
    return cast(nn.Module, transformer)


# -- single files


def derive(header: Any, standard: Config) -> tuple[Config, Locate]:
    """Config and places of a transformer in a single file: diffusers' names, but for the MLP's halves."""
    file = spelled(header, QWEN_21, "txt_in.text_norm.weight")
    width, inner = file.sides("img_in")[0], file.sides("transformer_blocks.0.img_mlp.out")[1]
    head = (file.shape("transformer_blocks.0.attn.norm_q.weight") or (int(standard["attention_head_dim"]),))[0]
    config = standard | {
        "in_channels": file.sides("img_in")[1], "out_channels": file.sides("proj_out")[0],
        "num_layers": file.count("transformer_blocks.{}.attn.to_q.weight"), "context_in_dim": file.sides("txt_in.in_layer")[1],
        "attention_head_dim": head, "num_attention_heads": max(1, file.sides("transformer_blocks.0.attn.to_q")[0] // head),
        "mlp_ratio": inner // max(1, width), "axes_dims_rope": [axis * head // 128 for axis in standard["axes_dims_rope"]],
    }  # fmt: skip
    return config, file.locate
