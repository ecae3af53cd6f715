"""Recompute each block's activations in the backward pass instead of keeping them (Chen et al. 2016).

Whole blocks, with random numbers and autocast as in the first run. Left out: choosing what to keep inside a block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..engine.recompute import recompute
from ..seam.family import BlockGroup
from ..seam.technique import WrapTechnique


class Recomputed:
    """Stands in for a block's `forward`, and counts: a checkpoint that is silently off looks just like one on."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.passes = 0
        """Forward passes with gradients."""
        self.runs = 0
        """Times the block really ran for them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.passes += 1
        return recompute(self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.forward(*args, **kwargs)


@dataclass(frozen=True)
class GradientCheckpointing(WrapTechnique):
    order: ClassVar[int] = 20

    every: int = 1
    """Wrap every n-th block of a group."""

    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        for group in groups:
            for block in group.blocks[:: self.every]:
                assert not isinstance(block.forward, Recomputed), f"a block of {group.name} is wrapped twice"
                block.forward = Recomputed(block.forward)


def recomputations(model: nn.Module) -> int:
    """How often blocks ran again for a backward pass since they were wrapped; 0 after a step means it is off."""
    wrapped = [module.forward for module in model.modules() if isinstance(module.forward, Recomputed)]
    return sum(each.runs - each.passes for each in wrapped)


TECHNIQUE = GradientCheckpointing
