"""What differs between a run that learns from images and one that learns from texts: data, previews, files.

A family names its modality. run/run.py calls these verbs in its order and knows no more about either. What both do alike
is here: the order of a run, previews that never harm it, files that are thinned out and proved.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ..config.schema import TrainingConfig
from ..machine.hardware import PartRow
from ..planner.caching import Encoding
from ..seam.family import Batch
from .desk import Desk, Progress, RunFacts, no_progress
from .order import Batches, Dataset, Draw
from .outputs import Outputs
from .previews import Previews

__all__ = [
    "Batches", "Dataset", "Desk", "Draw", "Loader", "Modality", "Outputs", "Previews", "Progress", "RunFacts", "no_progress",
]  # fmt: skip


class Loader(Protocol):
    def load_batch(self, draws: Sequence[Draw]) -> Batch: ...
    def validation_batches(self, batch_size: int = 1) -> Iterator[Batch]: ...


class Modality(ABC):
    """`read` first, then `batches`, `prepare`, `outputs`, in the order of the run."""

    previews: Previews[Any]
    loader: Loader
    trains_with_text: bool = False
    """Text encoders are needed beside the model while it trains."""
    parts: Sequence[PartRow] = ()
    """Of the models that prepared the data."""

    @abstractmethod
    def read(self, progress: Progress) -> tuple[list[str], list[str]]:
        """The data, checked; (warnings, notes) for the user. Raises DataError."""

    @abstractmethod
    def batches(self, training: TrainingConfig, seed: int) -> Batches[Any]: ...

    @abstractmethod
    def summary(self, batches: Any, epochs: int) -> list[str]:
        """What is trained on, counted, for the user."""

    @abstractmethod
    def prepare(self, desk: Desk) -> tuple[Encoding, str]:
        """The caching phase; sets `previews` and `loader`. How it was done in the end, and a line for the user."""

    @abstractmethod
    def outputs(self, facts: RunFacts, batches: Any) -> Outputs[Any, Any]: ...
