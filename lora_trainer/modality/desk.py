"""What a modality works with: before training, and when it writes a run's files."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config.loading import Loaded
from ..config.schema import Config
from ..journal.progress import Metrics, Terminal
from ..journal.run_folder import RunFolder
from ..machine.hardware import Precision
from ..planner.caching import Encoding, OnOom

Progress = Callable[[str, int, int], None]
"""Called with (phase, done, total)."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Says nothing."""


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
    tell: Callable[..., None]
