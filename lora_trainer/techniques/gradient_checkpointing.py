"""Recompute each block's activations in the backward pass instead of keeping them (Chen et al. 2016).

Whole blocks, with random numbers and autocast as in the first run. Left out: choosing what to keep inside a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.declared import Declared
from ..seam.technique import LEARNING, Blocks, Module, WrapTechnique


@dataclass(frozen=True)
class GradientCheckpointing(WrapTechnique):
    title = ("checkpoint de gradiente", "gradient checkpointing")
    when = ("ativações grandes", "activations are large")
    options = (Declared(
        ("training", "gradient_checkpointing"), "checkpoint_gradiente", place=10, phases=LEARNING, docs=(
            "Recalcula ativações no passo de volta para economizar memória; auto: se o plano precisar.",
            "Recompute activations in the backward pass to save memory; auto: if the plan needs it.")),)
    mildness = 10
    order = 20

    every: int = 1
    """Wrap every n-th block of a group."""

    @classmethod
    def on(cls, value: Any) -> bool:
        """Unless a plan says otherwise."""
        return bool(value != "no")

    def wrap(self, model: Module, groups: Blocks) -> None:
        from ..engine.recompute import Recomputed

        for group in groups:
            for block in group.blocks[:: self.every]:
                assert not isinstance(block.forward, Recomputed), f"a block of {group.name} is wrapped twice"
                block.forward = Recomputed(block.forward)


TECHNIQUE = GradientCheckpointing
