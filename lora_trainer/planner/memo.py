"""Simulations kept on disk: the same plan of the same run need not be simulated again for another card.

The key is the question's with the plan's values in place, and without what a simulation does not depend on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.declared import with_values
from ..config.names import Key
from ..engine.tracker import PhasePeak
from ..journal.progress import write_json
from ..techniques.block_streaming import MASTER
from .foresee import Question
from .simulate import Prediction

IRRELEVANT: dict[Key, Any] = {
    ("memory", "preset"): "none",
    ("memory", "vram"): None,
    ("memory", "ram"): None,
    MASTER.key: "auto",
}


class Memo:
    """`folder` None keeps nothing."""

    def __init__(self, question: Question, folder: Path | None) -> None:
        self._question = replace(question, available=None, written=frozenset(), preset_first=False)
        self._folder = folder

    def recall(self, values: Mapping[Key, Any], simulate: Callable[[], Prediction]) -> Prediction:
        """The prediction for these options, simulated if it must be."""
        if self._folder is None:
            return simulate()
        config = with_values(self._question.config, {**values, **IRRELEVANT})
        path = self._folder / f"{replace(self._question, config=config).key()}-simulated.json"
        if (known := _read(path)) is not None:
            return known
        prediction = simulate()
        _write(path, prediction)
        return prediction


def _read(path: Path) -> Prediction | None:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: PhasePeak(**peak) for name, peak in raw["phases"].items()}
        return Prediction(phases, int(raw["flops"]), int(raw["transferred"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, prediction: Prediction) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(prediction))
    except OSError:
        return  # costs time, no more
