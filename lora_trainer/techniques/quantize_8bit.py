"""Keep the blocks' linear and convolution layers as 8-bit integers: 1 byte a weight instead of 2.

Each output row has its own factor, so a weight moves by at most 1/254 of its row's largest; normal weights lose less than
1 % (root mean square). Only storage is in 8 bits: the weight is unpacked and computed with in the usual precision. Acts on
what quantize_4bit left alone when both are on. Left out: integer matrix products (LLM.int8()), which quantise activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..config.declared import Declared
from ._quantizer import BASE, TEXT, Quantizer, pack_rows

if TYPE_CHECKING:
    from torch import nn

    from ..seam.family import BlockGroup


@dataclass(frozen=True)
class Quantize8bit(Quantizer):
    options: ClassVar[tuple[Declared, ...]] = (BASE, TEXT)
    value: ClassVar[str] = "int8"
    loses: ClassVar[float] = 0.01
    mildness: ClassVar[int] = 80
    order: ClassVar[int] = 12

    convolutions: bool = True

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        import torch

        pack_rows(groups, torch.int8, self.value, convolutions=self.convolutions)


TECHNIQUE = Quantize8bit
