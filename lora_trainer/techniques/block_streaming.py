"""Keep the frozen base in host memory and bring its blocks to the card as they run (musubi-tuner's LoRA streaming, for
any model).

Weights travel one way; they come a second time for the backward pass, in which checkpointing runs each block again. Which
blocks stream is settled by bytes and spread evenly, so that the resident ones hide the copies of the others. Layers of a
streamed block are told their `home` before weights are read, so the card never holds the whole base. Adapters stay.

Left out: a staging buffer for memory that could not be page-locked, and convolutions or linears streamed one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.declared import Declared
from ..config.fields import Share
from ..seam.technique import CACHING, RESIDENT, Asked, Blocks, ConvertTechnique, Module, WrapTechnique

MASTER = Declared(
    ("memory", "mapped_master"), "mestre_em_disco", place=120, docs=(
        "Com pouca RAM, a cópia de onde os blocos vêm é um arquivo mapeado em disco.",
        "With little RAM, the copy that blocks are streamed from is a file mapped from disk."))


@dataclass(frozen=True)
class BlockStreaming(ConvertTechnique, WrapTechnique):
    title = ("streaming de blocos", "block streaming")
    when = (
        "o modelo base não cabe; fica na RAM e vem bloco por bloco",
        "the base does not fit; it lives in RAM and comes in block by block")
    options = (
        Declared(
            ("memory", "block_streaming"), "streaming_blocos", place=30, phases=RESIDENT, kind=Share, steps=(0.25, 0.5, 0.75, 1.0),
            elsewhere="blocks_to_swap block_swap layer_offload_fraction", docs=(
                "Parte dos blocos do modelo base que fica na RAM e vem à placa quando é usada: nao ou de 0 a 1.",
                "Share of the base's blocks kept in RAM and brought to the card when used: no, or 0 to 1.")),
        Declared(
            ("memory", "text_streaming"), "streaming_texto", place=70, phases=CACHING, docs=(
                "Os codificadores de texto vêm à placa camada por camada.",
                "Text encoders come to the card layer by layer.")),
        MASTER,
    )
    value = 1.0
    needs = {
        "gradient_checkpointing": (
            "os pesos trazidos ficariam na placa até o passo de volta",
            "the weights brought in would stay until the backward pass")}
    mildness = 40
    order = 15
    """After the quantisers, whose layers it marks; before checkpointing, inside which it must be."""

    fraction: float = 1.0
    """Of the blocks' bytes."""
    slots: int = 2
    """Device buffers: 1 holds least and overlaps nothing, 3 help where blocks are very uneven."""
    mapped: bool = False
    """The host master in a temporary file of `folder`, for machines short of RAM."""
    folder: str = "."

    @classmethod
    def on(cls, value: Any) -> bool:
        return isinstance(value, float)

    @classmethod
    def of(cls, asked: Asked) -> BlockStreaming | None:
        memory = asked.config.memory
        if not cls.is_on(asked.config):
            return None
        return cls(memory.block_streaming, mapped=memory.mapped_master == "yes", folder=asked.folder)

    def convert(self, model: Module, groups: Blocks) -> None:
        from ..engine.block_streaming import send_home

        send_home(groups, self.fraction, self._folder)

    def wrap(self, model: Module, groups: Blocks) -> None:
        from ..engine.block_streaming import stream

        stream(model, groups, self.fraction, self.slots, self._folder)

    @property
    def _folder(self) -> Path | None:
        return Path(self.folder) if self.mapped else None


TECHNIQUE = BlockStreaming
