"""What the presets come to: a prediction for each, and the comment lines in presets/*.yaml that state it.

`python -m lora_trainer.planner.presets` rewrites those lines. A preset says what is trained and in which micro-batches; how
it fits is the planner's to solve, for the card the preset is made for.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..atomic import replacing
from ..config import names, presets
from ..config.loading import Loaded, load
from ..config.names import shown
from ..config.reading import SIZE
from ..families import family_class
from ..files.sources import open_source
from ..machine.allowance import base_allowance
from ..machine.card import Card
from ..machine.hardware import choose_precision
from ..machine.ram import Ram
from ..machine.speed import speed_of
from ..units import gib
from .ask import ask
from .foresee import Foresight
from .picker import Choice, preset_budget

MARK = "# pico simulado:"
COMMON = Card("", (8, 0))
"""The cards that presets are made for are taken to be of the RTX 30 series."""
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
    found = foreseen(loaded, previews=bool(loaded.config.samples.prompts))
    if found is None or loaded.preset is None:
        return None
    speed = speed_of(None, presets.size_gib(loaded.preset))
    peak = card_of(loaded.preset).allowance.total(found.peak)
    return Predicted(peak, speed.seconds(found.flops, found.transferred), found.values, found.fits)


def predict_with_previews(loaded: Loaded) -> Predicted | None:
    """As `predict`, as if previews were drawn: what a preset must hold for everybody."""
    samples = loaded.config.samples.model_copy(update={"prompts": [""]})
    return predict(replace(loaded, config=loaded.config.model_copy(update={"samples": samples})))


def foreseen(loaded: Loaded, *, previews: bool) -> Foresight | None:
    config = loaded.config
    if loaded.preset is None or (config.model.base_or_architecture is None and config.model.family == "auto"):
        return None
    return ask(
        loaded,
        card_of(loaded.preset),
        open_source(base, shown("model", "base_model")) if (base := config.model.base_or_architecture) else None,
        choose_precision(config.training.mixed_precision, torch.device("cuda"), COMMON).name,
        worst=(config.training.batch_size, None),
        previews=previews,
        validation=config.data.validation_fraction > 0,
        ram=ROOMY,
    )


def card_of(name: str) -> Choice:
    """What is usually free of a card of the preset's size."""
    return Choice(torch.device("cpu"), None, name, preset_budget(name), base_allowance(COMMON, "Linux"), "")


def write_peaks(predict: Predict, folder: Path = presets.FOLDER) -> None:
    """Put the predicted peak of each family, or of each of its sizes, into the comment under its name, in every preset."""
    for name in presets.names():
        path = folder / f"{name}.yaml"
        base, family, lines = "", "", []
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := _FAMILY_LINE.match(line):
                family = match[1]
                base = f"model.family={family}"
            elif match := _SIZE_LINE.match(line):
                base = f"model.architecture={family_class(family).sizes[float(match[1])]}"
            lines.append(_with_peak(line, path, name, base, predict) if MARK in line else line)
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
    write_peaks(predict_with_previews)
