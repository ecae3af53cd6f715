"""What the presets come to: a prediction for each, and the comment lines in presets/*.yaml that state it.

`python -m lora_trainer.planner.presets [family…]` rewrites those lines; without a family, all of them. A preset says what is
trained and in which micro-batches; how it fits is the planner's to solve, for the card the preset is made for.
"""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..atomic import replacing
from ..config import names, presets
from ..config.loading import Loaded, load
from ..config.reading import SIZE
from ..families import family_class
from ..machine.allowance import base_allowance
from ..machine.ram import Ram
from ..machine.speed import speed_of
from ..units import gib
from .ask import ask_of_config
from .picker import Choice, preset_budget

MARK = "# pico simulado:"
ROOMY = Ram(total=64 * 2**30, available=64 * 2**30)
_FAMILY_LINE = re.compile(r"^  (\w+):")
_SIZE_LINE = re.compile(rf"^      {SIZE.pattern}:")


@dataclass(frozen=True)
class Predicted:
    """Of one config on one card."""

    peak: int
    """Bytes of the whole process, CUDA context included."""
    seconds_per_step: float | None = None
    values: Mapping[names.Key, Any] = field(default_factory=dict)
    """The options solved."""
    fits: bool = True


Predict = Callable[[Loaded], Predicted | None]


def predict(loaded: Loaded) -> Predicted | None:
    """Of a config over a preset, on the preset's card; None where the family is not known."""
    model = loaded.config.model
    if loaded.preset is None or (model.base_or_architecture is None and model.family == "auto"):
        return None
    card, speed = card_of(loaded.preset), speed_of(None, presets.size_gib(loaded.preset))
    found = ask_of_config(loaded, card, ROOMY)
    return Predicted(card.allowance.total(found.peak), speed.seconds(found.flops, found.transferred), found.values, found.fits)


def predict_with_previews(loaded: Loaded) -> Predicted | None:
    """As `predict`, as if previews were drawn: what a preset must hold for everybody."""
    samples = loaded.config.samples.model_copy(update={"prompts": [""]})
    return predict(replace(loaded, config=loaded.config.model_copy(update={"samples": samples})))


def card_of(name: str) -> Choice:
    """What is usually free of a card of the preset's size."""
    return Choice(torch.device("cpu"), None, name, preset_budget(name), base_allowance(None, "Linux"), "")


def write_peaks(predict: Predict, folder: Path = presets.FOLDER, families: Collection[str] = ()) -> None:
    """Put the predicted peak of each family, or of each of its sizes, into the comment under its name, in every preset.

    Of the `families` asked for; of all, if none is.
    """
    for name in presets.names():
        path = folder / f"{name}.yaml"
        base, family, lines = "", "", []
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := _FAMILY_LINE.match(line):
                family = match[1]
                base = f"model.family={family}"
            elif match := _SIZE_LINE.match(line):
                base = f"model.architecture={family_class(family).sizes[float(match[1])]}"
            asked = MARK in line and (not families or family in families)
            lines.append(_with_peak(line, path, name, base, predict) if asked else line)
        with replacing(path) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_peak(line: str, path: Path, name: str, base: str, predict: Predict) -> str:
    predicted = predict(load(path, [base], required=()))
    if predicted is None:
        return line
    left = gib(preset_budget(name) - predicted.peak)
    text = f"{line.partition(MARK)[0]}{MARK} {gib(predicted.peak)} com o contexto CUDA; sobram {left}"
    return f"{text}; {plan}" if (plan := _plan_text(predicted.values)) else text


def _plan_text(values: Mapping[names.Key, Any]) -> str:
    """In Portuguese, as the presets are."""
    shown = [(names.options()[key], value) for key, value in values.items() if value not in ("no", None)]
    words = [(option.shown("pt"), option.word(value, "pt") if isinstance(value, str) else value) for option, value in shown]
    return ", ".join(f"{name.partition('.')[2]}: {word}" for name, word in words)


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(presets.families()):
        sys.exit(f"no family: {', '.join(sorted(unknown))}")
    write_peaks(predict_with_previews, families=sys.argv[1:])
