"""What differs between a run that learns from images and one that learns from texts: data, previews, files.

A family names its modality. run/run.py calls these verbs in its order and knows no more about either.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .adapters import Adapter
from .config.loading import Loaded
from .config.schema import Config, TrainingConfig
from .journal.progress import Metrics, Terminal
from .journal.run_folder import RunFolder
from .machine.hardware import PartRow, Precision
from .planner.caching import Encoding, OnOom
from .seam.family import Batch
from .techniques import MemoryPlan

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


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


class Batches(Protocol):
    """The order of a whole run as a function of the optimizer step."""

    @property
    def dataset(self) -> Dataset: ...

    steps_per_epoch: int

    def window(self, step: int) -> list[list[Draw]]: ...
    def epoch(self, step: int) -> int: ...
    def worst(self) -> list[Draw]:
        """The micro-batch that needs most memory."""
        ...

    def worst_size(self) -> tuple[int, tuple[int, int]]:
        """Rows and their size, as Family.example_batch takes them, that bound every micro-batch of the run."""
        ...

    def cost(self, draws: Sequence[Draw]) -> int:
        """Grows with the memory that a micro-batch needs."""
        ...

    def split(self, draws: list[Draw], rows: int) -> list[list[Draw]]:
        """The same examples in micro-batches of at most `rows` rows."""
        ...


class Loader(Protocol):
    def load_batch(self, draws: Sequence[Draw]) -> Batch: ...
    def validation_batches(self, batch_size: int = 1) -> Iterator[Batch]: ...


class Previews(Protocol):
    """Never harm the run. `plan` is set when the model is built, and whenever it changes."""

    plan: MemoryPlan

    def draw(self, model: nn.ModuleDict, adapter: Adapter, step: int, folder: RunFolder) -> None: ...
    def measure_before(self, model: nn.ModuleDict, adapter: Adapter) -> None: ...
    def measure_after(self, model: nn.ModuleDict) -> None: ...


class Outputs(ABC):
    """The files a run leaves for its user."""

    written: list[Path]

    @abstractmethod
    def save(self, adapter: Adapter, step: int, *, intermediate: bool) -> list[Path]:
        """Write every format asked for; intermediate files beyond `manter_ultimos` go."""

    @abstractmethod
    def finish(self, model: nn.ModuleDict, adapter: Adapter, step: int) -> list[str]:
        """Write the final files and prove each; the lines that "done" prints."""

    @abstractmethod
    def last_good(self) -> str:
        """Where the last usable result is, for a run that diverged."""


@dataclass(frozen=True)
class Desk:
    """What the work before training is done with."""

    config: Config
    device: torch.device
    precision: Precision
    terminal: Terminal
    metrics: Metrics
    seed: int
    encoding: Encoding
    heard: OnOom


@dataclass(frozen=True)
class RunFacts:
    """Of one run, for its files."""

    loaded: Loaded
    folder: RunFolder
    day: str
    total: int
    tell: Callable[[str], None]


class Modality(ABC):
    """`read` first, then `batches`, `prepare`, `outputs`, in the order of the run."""

    previews: Previews
    loader: Loader
    trains_with_text: bool = False
    """Text encoders are needed beside the model while it trains."""
    parts: Sequence[PartRow] = ()
    """Of the models that prepared the data."""

    @abstractmethod
    def read(self, progress: Progress) -> tuple[list[str], list[str]]:
        """The data, checked; (warnings, notes) for the user. Raises DataError."""

    @abstractmethod
    def batches(self, training: TrainingConfig, seed: int) -> Batches: ...

    @abstractmethod
    def summary(self, batches: Any, epochs: int) -> list[str]:
        """What is trained on, counted, for the user."""

    @abstractmethod
    def prepare(self, desk: Desk) -> tuple[Encoding, str]:
        """The caching phase; sets `previews` and `loader`. How it was done in the end, and a line for the user."""

    @abstractmethod
    def outputs(self, facts: RunFacts, batches: Any) -> Outputs: ...
