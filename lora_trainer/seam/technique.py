"""A technique trades time for memory. One file each; its fields are its settings; its class says where it acts.

No technique predicts anything: the simulator applies the technique itself to a fake model and measures. One that acts
in several places (mixed precision) derives from several of these classes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ..config.schema import TrainingConfig
from .family import BlockGroup

Groups = list[dict[str, Any]]
"""Parameters by learning rate, as optimizers take them."""


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
