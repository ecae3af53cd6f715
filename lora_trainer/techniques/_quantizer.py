"""What techniques that keep the frozen base in few bits share: the options to which each adds its `value`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config.declared import Declared, value_of
from ..seam.technique import RESIDENT, Asked, Blocks, ConvertTechnique, Module
from . import packing

BASE = Declared(
    ("memory", "base_quantization"), "quantizacao_base", place=90, phases=RESIDENT, kind=None,
    elsewhere="fp8_base load_in_4bit load_in_8bit quantize base_model_precision", docs=(
        "Como o modelo base congelado é guardado: nao (16 bits), {sized}.",
        "How the frozen base is stored: no (16 bits), {sized}."))
TEXT = Declared(
    ("memory", "text_quantization"), "quantizacao_texto", place=80, kind=None,
    phases=frozenset({"cache", "text_cache"}), docs=(
        "Como os codificadores de texto são guardados ao codificar as legendas: nao, {values}.",
        "How text encoders are stored while captions are encoded: no, {values}."))


class Quantizer(ConvertTechnique):
    """`value` is also its name to the user."""

    title = ("base em {values}", "{values} base")
    when = ("também falta RAM", "RAM is short too")
    options: ClassVar[tuple[Declared, ...]] = (BASE,)
    lossless = False
    bits: ClassVar[int] = 8
    takes = {"frozen": 0.5}
    value: ClassVar[str]
    loses: ClassVar[float]
    """Of normal weights, root mean square, at most: its stated bound."""
    rest: ClassVar[str] = ""
    """Technique (file name) for the layers that this one leaves alone, if any."""

    @classmethod
    def of(cls, asked: Asked) -> Quantizer | None:
        return cls() if cls in packing(value_of(asked.config, BASE.key)) else None

    @classmethod
    def bound(cls) -> str:
        return f"{cls.value} {100 * cls.loses:g} %"

    @classmethod
    def sized(cls) -> str:
        return f"{cls.value} ({cls.bits} bits)" if cls.bits < 8 else str(cls.value)


@dataclass(frozen=True)
class RowQuantizer(Quantizer):
    """In 8 bits a weight, of PyTorch's dtype `storage`, with a factor for each row."""

    storage: ClassVar[str]

    convolutions: bool = True

    def convert(self, model: Module, groups: Blocks) -> None:
        import torch
        from torch import nn

        from ..engine.packed import RowScaled, pack_layers

        kinds = (nn.Linear, nn.Conv2d) if self.convolutions else (nn.Linear,)
        pack_layers(groups, RowScaled(getattr(torch, self.storage), kinds, self.value))
