"""Keep the blocks' linear and convolution layers as 8-bit floats (e4m3): 1 byte a weight instead of 2.

Each output row is scaled to the format's range, so a weight moves by at most 1/16 of itself (3 bits of mantissa); normal
weights lose 3 % (root mean square), where quantize_8bit loses less than 1 %. Its merit is with outliers: small weights of
a row stay as exact as large ones. Only storage is in fp8, so it works on every card. Acts on what quantize_4bit left alone
when both are on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..engine.packed import RowScaled, pack_layers
from ..seam.family import BlockGroup
from ..seam.technique import ConvertTechnique


@dataclass(frozen=True)
class CastFp8(ConvertTechnique):
    order: ClassVar[int] = 14
    lossless: ClassVar[bool] = False

    convolutions: bool = True

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        kinds = (nn.Linear, nn.Conv2d) if self.convolutions else (nn.Linear,)
        pack_layers(groups, RowScaled(torch.float8_e4m3fn, kinds))


TECHNIQUE = CastFp8
