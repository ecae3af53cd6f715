"""Keep what checkpointing saves (the blocks' inputs) in host memory between forward and backward pass: engine/activations.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..config.declared import Declared
from ..seam.technique import LEARNING, Blocks, ContextTechnique, Module, WrapTechnique

if TYPE_CHECKING:
    from ..engine.activations import Pool


@dataclass(frozen=True)
class ActivationOffload(WrapTechnique, ContextTechnique):
    title = ("descarga de ativações", "activation offload")
    when = ("imagens grandes, depois do checkpoint", "large images, after checkpointing")
    options = (Declared(
        ("memory", "activation_offload"), "descarga_ativacoes", place=40, phases=LEARNING,
        elsewhere="cpu_offload_checkpointing", docs=(
            "Guarda na RAM as ativações dos checkpoints de gradiente.",
            "Keep the activations of gradient checkpoints in RAM.")),)
    needs = {
        "gradient_checkpointing": ("todas as ativações iriam e voltariam", "every activation would travel")}
    mildness = 30
    order = 30

    min_bytes: int = 1 << 20
    """Smaller tensors are not worth a copy."""

    @cached_property
    def _pool(self) -> Pool:
        from ..engine.activations import Pool

        return Pool()

    def wrap(self, model: Module, groups: Blocks) -> None:
        self._pool.start((*model.parameters(), *model.buffers()))

    def context(self) -> AbstractContextManager[object]:
        from ..engine.activations import Offloading

        return Offloading(self._pool, self.min_bytes)

    def release(self) -> None:
        """Give the host buffers back to the system."""
        self._pool.free.clear()


TECHNIQUE = ActivationOffload
