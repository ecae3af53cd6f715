"""A technique trades time for memory. One file each; its fields are its settings; its class says where it acts.

No technique predicts anything: the simulator applies the technique itself to a fake model and measures. One that acts
in several places (mixed precision) derives from several of these classes.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..config.schema import TrainingConfig
from ..families._base import BlockGroup
from ..optimizers import Groups, build_optimizer


class Technique:
    needs: ClassVar[tuple[str, ...]] = ()
    """Techniques (file names) that must be on as well."""
    excludes: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 50
    """Lower acts first, so ends up closer to the block."""
    lossless: ClassVar[bool] = True
    """False where the effect on the numbers is bounded, not nil."""


class ConvertTechnique(Technique):
    """Acts once, on the frozen base on `meta`, before weights are read and adapters added.

    A layer that is to be kept packed becomes one with `pack_weight(tensor, home)`; one whose weights are to live in
    host memory gets a `home` device. See families/_weights.load_all.
    """

    @abstractmethod
    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None: ...


class WrapTechnique(Technique):
    """Acts once, on the model with its adapters in place."""

    @abstractmethod
    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None: ...


class ContextTechnique(Technique):
    """Acts around every forward pass (and its loss); the backward pass runs outside."""

    @abstractmethod
    def context(self) -> AbstractContextManager[object]: ...


class ScalerTechnique(Technique):
    """Scales the loss so that small gradients survive 16 bits."""

    @abstractmethod
    def scaler(self) -> torch.amp.GradScaler: ...


class OptimizerTechnique(Technique):
    """Builds the optimizer."""

    @abstractmethod
    def build(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class MemoryPlan:
    """The techniques of a run, applied in their order."""

    techniques: tuple[Technique, ...]

    def ordered(self) -> list[Technique]:
        return sorted(self.techniques, key=lambda technique: technique.order)

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        for technique in self.ordered():
            if isinstance(technique, ConvertTechnique):
                technique.convert(model, groups)

    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
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
        for technique in self.ordered():
            if isinstance(technique, ScalerTechnique):
                return technique.scaler()
        return torch.amp.GradScaler("cpu", enabled=False)

    def build_optimizer(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
        for technique in self.ordered():
            if isinstance(technique, OptimizerTechnique):
                return technique.build(groups, settings)
        return build_optimizer(groups, settings)
