"""What the presets come to: a prediction for each, and the comment lines in presets/*.yaml that state it.

`python -m lora_trainer.memory.presets` rewrites those lines.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..config import presets
from ..config.loading import Loaded, load
from ..picker import preset_budget
from ..progress import gib

MARK = "# pico simulado:"
_FAMILY_LINE = re.compile(r"^  (\w+):")


@dataclass(frozen=True)
class Predicted:
    """Of one config on one card."""

    peak: int
    """Bytes of the whole process, CUDA context included."""
    seconds_per_step: float | None = None


Predict = Callable[[Loaded], Predicted | None]


def predict(loaded: Loaded) -> Predicted | None:
    """None while no simulator is at hand."""
    return None


def write_peaks(predict: Predict, folder: Path = presets.FOLDER) -> None:
    """Put the predicted peak of each family into the comment under its name, in every preset."""
    for name in presets.names():
        path = folder / f"{name}.yaml"
        family, lines = "", []
        for line in path.read_text(encoding="utf-8").splitlines():
            family = match[1] if (match := _FAMILY_LINE.match(line)) else family
            lines.append(_with_peak(line, path, name, family, predict) if MARK in line else line)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def _with_peak(line: str, path: Path, name: str, family: str, predict: Predict) -> str:
    predicted = predict(load(path, [f"model.family={family}"], required=()))
    if predicted is None:
        return line
    left = preset_budget(name) - predicted.peak
    return f"{line.partition(MARK)[0]}{MARK} {gib(predicted.peak)} com o contexto CUDA; sobram {gib(left)}"


if __name__ == "__main__":
    write_peaks(predict)
