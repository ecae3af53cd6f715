"""Weights in 4 bits (NF4 or FP4, Dettmers et al. 2023): 64 of them share a factor.

A code lies within 0.152 (NF4) or 0.167 (FP4) of the block's largest weight; normal weights lose 9 or 12 % (root mean square).
Double quantisation keeps 256 factors as 8-bit logarithms, which moves a factor by less than 2 %, usually 0.2 %, whatever
outliers there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .packed import Packing

BLOCK = 64
"""Weights that share a factor."""
GROUP = 256
"""Factors that share a smallest and a largest one."""
WIDEST = math.log(2.0**14)
"""Smaller factors of a group are raised to this distance from its largest: ln(2^14) / 255 / 2 is the 2 %."""


@dataclass(frozen=True)
class FourBit(Packing):
    kind: Literal["nf4", "fp4"]
    double: bool

    @property
    def title(self) -> str:
        return self.kind

    def fits(self, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear) and layer.in_features * layer.out_features % BLOCK == 0

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        import bitsandbytes  # noqa: F401  (brings the operators)

        rows = weight.reshape(-1, BLOCK)
        codes, scale = torch.ops.bitsandbytes.quantize_4bit.default(rows, BLOCK, self.kind, torch.uint8)
        return {"codes": codes, **(_pack_scale(scale) if self.double else {"scale": scale})}

    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes, *scales = packed
        count = shape.numel() // BLOCK
        scale = _unpack_scale(scales, count) if self.double else scales[0]
        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        weight: Tensor = dequantize(codes, scale, BLOCK, self.kind, (count, BLOCK), dtype)
        return weight.view(shape)


def _pack_scale(scale: Tensor) -> dict[str, Tensor]:
    """(N,) float32 -> 8-bit logarithms (ceil(N / 256), 256), and each group's smallest logarithm and step."""
    missing = -len(scale) % GROUP
    logs = torch.cat([scale, scale[-1:].expand(missing)]).clamp_min(torch.finfo(torch.float32).tiny).log()
    logs = logs.view(-1, GROUP)
    top = logs.amax(1, keepdim=True)
    low = torch.maximum(logs.amin(1, keepdim=True), top - WIDEST)
    step = ((top - low) / 255).clamp_min(1e-9)
    return {
        "scale": ((logs - low) / step).round_().clamp_(0, 255).to(torch.uint8),
        "scale_low": low,
        "scale_step": step,
    }


def _unpack_scale(packed: Sequence[Tensor], count: int) -> Tensor:
    codes, low, step = packed
    return torch.addcmul(low, codes.float(), step).exp_().view(-1)[:count]
