"""A technique trades time for memory. One file each; its fields are its settings; its class says where it acts.

No technique predicts anything: the simulator applies the technique itself to a fake model and measures.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..families._base import BlockGroup


class Technique(ABC):
    needs: ClassVar[tuple[str, ...]] = ()
    """Techniques (file names) that must be on as well."""
    excludes: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 50
    """Lower acts first, so ends up closer to the block."""
    lossless: ClassVar[bool] = True
    """False for quantisers, whose effect on the numbers is bounded, not nil."""


class ConvertTechnique(Technique):
    """Acts once, on the frozen base, before adapters are added."""

    @abstractmethod
    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None: ...


class WrapTechnique(Technique):
    """Acts once, on the model with its adapters in place."""

    @abstractmethod
    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None: ...


class ContextTechnique(Technique):
    """Acts around every forward and backward pass."""

    @abstractmethod
    def context(self) -> AbstractContextManager[object]: ...


class OptimizerTechnique(Technique):
    """Builds the optimizer."""

    @abstractmethod
    def build(self, groups: list[dict[str, object]]) -> torch.optim.Optimizer: ...


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
