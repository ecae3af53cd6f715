"""Simulations kept on disk: the same plan of the same run need not be simulated again for another card.

The key is the question's with the plan's values in place, and without what a simulation does not depend on.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..atomic import keep_json
from ..config.declared import with_values
from ..config.names import Key
from ..techniques.block_streaming import MASTER
from .foresee import Question
from .simulate import Prediction

IRRELEVANT: dict[Key, Any] = {
    ("memory", "preset"): "none",
    ("memory", "vram"): None,
    ("memory", "ram"): None,
    MASTER.key: "auto",
}
_PREDICTION = TypeAdapter(Prediction)


class Memo:
    """Of one question, in `folder`."""

    def __init__(self, question: Question, folder: Path) -> None:
        self._question = replace(question, available=None, written=frozenset(), preset_first=False)
        self._folder = folder

    def recall(self, values: Mapping[Key, Any], simulate: Callable[[], Prediction]) -> Prediction:
        """The prediction for these options, simulated if it must be."""
        config = with_values(self._question.config, {**values, **IRRELEVANT})
        path = self._folder / f"{replace(self._question, config=config).key()}-simulated.json"
        with contextlib.suppress(OSError, ValueError):  # none, or a damaged one
            return _PREDICTION.validate_json(path.read_bytes())
        prediction = simulate()
        keep_json(path, asdict(prediction))
        return prediction
