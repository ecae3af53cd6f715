"""Which examples an optimizer step sees, as a pure function of the step."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


@dataclass(frozen=True)
class Draw:
    item: int
    """Index into `Dataset.examples`."""
    epoch: int
    occurrence: int
    """Which of the item's repeats in this epoch."""


class Dataset(Protocol):
    @property
    def validation(self) -> Sequence[Any]: ...

    def fingerprint(self) -> str:
        """Changes whenever a resumed run would see other data."""
        ...


D = TypeVar("D", bound=Dataset)


class Batches(ABC, Generic[D]):
    """The order of an entire run; nothing in it advances, so any step's window can be made again."""

    def __init__(self, dataset: D, batch_size: int, accumulation: int, seed: int) -> None:
        assert batch_size >= 1
        assert accumulation >= 1
        self.dataset, self.batch_size, self.accumulation, self.seed = dataset, batch_size, accumulation, seed
        self._windows = functools.lru_cache(maxsize=2)(self._make_windows)
        first = self._windows(0)
        self.steps_per_epoch = len(first)
        self.batches_per_epoch = sum(map(len, first))

    @abstractmethod
    def _make_windows(self, epoch: int) -> list[list[list[Draw]]]:
        """The micro-batches of each optimizer step of an epoch."""

    @abstractmethod
    def cost(self, draws: Sequence[Draw]) -> int:
        """Grows with the memory that a micro-batch needs."""

    @abstractmethod
    def worst_size(self) -> tuple[int, tuple[int, int]]:
        """Rows and their size, as Family.example_batch takes them, that bound every micro-batch of the run."""

    @abstractmethod
    def split(self, draws: list[Draw], rows: int) -> list[list[Draw]]:
        """The same examples in micro-batches of at most `rows` rows."""

    def window(self, step: int) -> list[list[Draw]]:
        """The micro-batches of optimizer step `step`, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return [list(draws) for draws in self._windows(epoch)[place]]

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def worst(self) -> list[Draw]:
        """The micro-batch of the first epoch that needs most memory."""
        return max(self.first_epoch(), key=self.cost)

    def first_epoch(self) -> list[list[Draw]]:
        """Its micro-batches."""
        return [list(draws) for window in self._windows(0) for draws in window]
