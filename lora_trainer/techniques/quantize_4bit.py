"""Keep the blocks' linear layers in 4 bits (QLoRA, Dettmers et al. 2023): 0.52 bytes a weight instead of 2.

Left alone: convolutions, whose error a UNet shows more (combine with quantize_8bit or cast_fp8), and layers of a size not
divisible by 64. The format is engine/four_bit.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from ..engine.four_bit import FourBit
from ..engine.packed import pack_layers
from ..seam.family import BlockGroup
from ..seam.technique import ConvertTechnique


@dataclass(frozen=True)
class Quantize4bit(ConvertTechnique):
    order: ClassVar[int] = 10
    lossless: ClassVar[bool] = False

    kind: Literal["nf4", "fp4"] = "nf4"
    double: bool = True

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        pack_layers(groups, FourBit(self.kind, self.double))


TECHNIQUE = Quantize4bit
