"""Keep the blocks' linear and convolution layers as 8-bit integers: 1 byte a weight instead of 2.

Each output row has its own factor, so a weight moves by at most 1/254 of its row's largest; normal weights lose less than
1 % (root mean square). Only storage is in 8 bits: the weight is unpacked and computed with in the usual precision. Acts on
what quantize_4bit left alone when both are on. Left out: integer matrix products (LLM.int8()), which quantise activations.
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
class Quantize8bit(ConvertTechnique):
    order: ClassVar[int] = 12
    lossless: ClassVar[bool] = False

    convolutions: bool = True

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        kinds = (nn.Linear, nn.Conv2d) if self.convolutions else (nn.Linear,)
        pack_layers(groups, RowScaled(torch.int8, kinds))


TECHNIQUE = Quantize8bit
