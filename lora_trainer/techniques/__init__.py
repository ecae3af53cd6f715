"""Memory techniques, one file each, found by name; and the plan of a run: those that it uses, applied in their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.declared import PACKAGE, techniques
from ..plugins import load
from ..seam.technique import (
    Blocks,
    ContextTechnique,
    ConvertTechnique,
    Groups,
    Module,
    OptimizerTechnique,
    ScalerTechnique,
    Technique,
    WrapTechnique,
)

if TYPE_CHECKING:
    import torch

    from ..config.schema import TrainingConfig


@dataclass(frozen=True)
class MemoryPlan:
    """The techniques of a run, applied in their order."""

    techniques: tuple[Technique, ...]

    def ordered(self) -> list[Technique]:
        return sorted(self.techniques, key=lambda technique: technique.order)

    def convert(self, model: Module, groups: Blocks) -> None:
        for technique in self.ordered():
            if isinstance(technique, ConvertTechnique):
                technique.convert(model, groups)

    def wrap(self, model: Module, groups: Blocks) -> None:
        for technique in self.ordered():
            if isinstance(technique, WrapTechnique):
                technique.wrap(model, groups)

    @contextmanager
    def step_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            for technique in self.ordered():
                if isinstance(technique, ContextTechnique):
                    stack.enter_context(technique.context())
            yield

    def scaler(self) -> torch.amp.GradScaler:
        """The plan's loss scaler; one that does nothing where no technique brings one."""
        import torch

        for technique in self.ordered():
            if isinstance(technique, ScalerTechnique):
                return technique.scaler()
        return torch.amp.GradScaler("cpu", enabled=False)

    def build_optimizer(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
        from ..optim.optimizers import build_optimizer

        for technique in self.ordered():
            if isinstance(technique, OptimizerTechnique):
                return technique.build(groups, settings)
        return build_optimizer(groups, settings)


def packing(value: str) -> list[type[ConvertTechnique]]:
    """What packs frozen weights that are to be kept as `value`: the technique that adds this value to the option, and the one
    to which it leaves the rest."""
    chosen = [technique for technique in techniques() if issubclass(technique, ConvertTechnique) and technique.value == value]
    return [*chosen, *(load(PACKAGE, technique.rest).TECHNIQUE for technique in chosen if technique.rest)]
