"""A technique trades time for memory. One file each; its fields are its settings; its class says where it acts.

The class also declares all that the program must know of it: its options (from which the schema is assembled), what it
needs and excludes, how mild it is, the phases it helps in, its words. So its file must be readable without PyTorch: what
is heavy is imported inside the verbs. No technique predicts anything: the simulator applies the technique itself to a fake
model and measures. One that acts in several places (mixed precision) derives from several of these classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ..config.declared import Both, Conflict, Declared, Key, value_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config.schema import Config, TrainingConfig
    from .family import BlockGroup

Module: TypeAlias = "nn.Module"
Blocks: TypeAlias = "Sequence[BlockGroup]"
"""Of a base, group by group."""
Groups = list[dict[str, Any]]
"""Parameters by learning rate, as optimizers take them."""
LEARNING = frozenset({"", "train", "forward", "backward"})
"""Phases in which activations are kept; "" is a phase that nobody knows."""
RESIDENT = LEARNING | {"load", "optimizer", "validation", "save", "preview"}
"""Phases in which the base, its adapter and the optimizer are there."""
CACHING = frozenset({"cache", "text_cache", "latent_cache"})


@dataclass(frozen=True)
class Asked:
    """What a run asks of its techniques. Where an option is still `auto`, no plan has spoken: the usual holds."""

    config: Config
    compute: str
    """"fp16", "bf16" or "fp32"."""
    device: str
    """Device type, "cuda" or "cpu"."""
    folder: str
    """Where a mapped host master would lie."""


@dataclass(frozen=True)
class Technique:
    title: ClassVar[Both]
    when: ClassVar[Both]
    """The cases it is for: with the title, its row in the README's table."""
    options: ClassVar[tuple[Declared, ...]] = ()
    """The first switches it. None for one that follows from the machine or is part of another."""
    key: ClassVar[Key]
    """Of the first option."""
    value: ClassVar[Any] = "yes"
    """Of its first option: what switches it on, of an option that it shares with others."""
    needs: ClassVar[Mapping[str, Both]] = {}
    """Techniques (file names) that must be on as well, and what would happen without them."""
    excludes: ClassVar[tuple[Conflict, ...]] = ()
    """Asked where it is on; one of the two options is its own."""
    order: ClassVar[int] = 50
    """Lower acts first, so ends up closer to the block."""
    lossless: ClassVar[bool] = True
    """False where the effect on the numbers is bounded, not nil."""
    mildness: ClassVar[int] = 100
    """Its rung: lower is taken first when memory is short."""
    asked_only: ClassVar[bool] = False
    """The program neither chooses nor proposes it."""
    some_bases: ClassVar[bool] = False
    """Not every base has what it acts on: `finds` tells."""
    takes: ClassVar[Mapping[str, float]] = {}
    """Of the bytes of a cause (frozen, optimizer, …) the share that it takes off the card at most: not tried where even that
    would not do."""

    def __init_subclass__(cls) -> None:
        if cls.options:
            cls.key = cls.options[0].key

    @classmethod
    def on(cls, value: Any) -> bool:
        """Whether this value of its first option switches it on."""
        return bool(value == cls.value)

    @classmethod
    def is_on(cls, config: Config) -> bool:
        return bool(cls.options) and cls.on(value_of(config, cls.key))

    @classmethod
    def sized(cls) -> str:
        """`value` as the option's documentation says it."""
        return str(cls.value)

    @classmethod
    def changes(cls) -> Both:
        """Whether it changes the numbers, for people."""
        return ("não", "no") if cls.lossless else ("dentro de um limite testado", "within a tested bound")

    @classmethod
    def bound(cls) -> str:
        """How far it changes the numbers at most, where one figure tells; with its name, if it shares an option."""
        return ""

    @classmethod
    def helps(cls, config: Config) -> bool:
        """Whether nothing that it excludes is in force, so that it may be switched on."""
        return not any(conflict.holds(config) for conflict in cls.excludes)

    @classmethod
    def finds(cls, model: Module, groups: Blocks) -> bool:
        """Whether this base, on meta, has what it acts on."""
        return True

    @classmethod
    def of(cls, asked: Asked) -> Technique | None:
        """With the settings that a run's options give it; None where it is off."""
        return cls() if cls.is_on(asked.config) else None


class ConvertTechnique(Technique):
    """Acts once, on the frozen base on `meta`, before weights are read and adapters added.

    A layer that is to be kept packed becomes one with `pack_weight(tensor, home)`; one whose weights are to live in
    host memory gets a `home` device. See bases/weights.load_all.
    """

    @abstractmethod
    def convert(self, model: Module, groups: Blocks) -> None: ...


class WrapTechnique(Technique):
    """Acts once, on the model with its adapters in place."""

    @abstractmethod
    def wrap(self, model: Module, groups: Blocks) -> None: ...


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
