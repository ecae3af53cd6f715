"""Keep the blocks' linear layers in 4 bits (QLoRA, Dettmers et al. 2023): 0.52 bytes a weight instead of 2.

Left alone: convolutions, whose error a UNet shows more (combine with quantize_8bit or cast_fp8), and layers of a size not
divisible by 64. The format is engine/four_bit.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..seam.technique import Blocks, Module
from ._quantizer import BASE, TEXT, Quantizer


@dataclass(frozen=True)
class Quantize4bit(Quantizer):
    options = (BASE, TEXT)
    value = "nf4"
    loses = 0.095
    mildness = 90
    order = 10
    bits = 4
    takes = {"frozen": 0.75}
    rest = "quantize_8bit"
    """Which costs no measurable accuracy."""

    kind: Literal["nf4", "fp4"] = "nf4"
    double: bool = True

    def convert(self, model: Module, groups: Blocks) -> None:
        from ..engine.four_bit import FourBit
        from ..engine.packed import pack_layers

        pack_layers(groups, FourBit(self.kind, self.double))


TECHNIQUE = Quantize4bit
