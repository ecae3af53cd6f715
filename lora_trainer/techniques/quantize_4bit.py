"""Keep the blocks' linear layers in 4 bits (QLoRA, Dettmers et al. 2023): 0.52 bytes a weight instead of 2.

Left alone: convolutions, whose error a UNet shows more (combine with quantize_8bit or cast_fp8), and layers of a size not
divisible by 64. The format is engine/four_bit.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config.declared import Declared
from ..seam.technique import Blocks, Module
from ._quantizer import BASE, TEXT, Quantizer


@dataclass(frozen=True)
class Quantize4bit(Quantizer):
    options: ClassVar[tuple[Declared, ...]] = (BASE, TEXT)
    value: ClassVar[str] = "nf4"
    loses: ClassVar[float] = 0.095
    mildness: ClassVar[int] = 90
    order: ClassVar[int] = 10
    bits: ClassVar[int] = 4
    takes: ClassVar[Mapping[str, float]] = {"frozen": 0.75}
    rest: ClassVar[str] = "quantize_8bit"
    """Which costs no measurable accuracy."""

    kind: Literal["nf4", "fp4"] = "nf4"
    double: bool = True

    def convert(self, model: Module, groups: Blocks) -> None:
        from ..engine.four_bit import FourBit
        from ..engine.packed import pack_layers

        pack_layers(groups, FourBit(self.kind, self.double))


TECHNIQUE = Quantize4bit
