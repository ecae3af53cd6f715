"""`presets`: the five presets side by side, for the family of a config, or for every family there is."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import names, presets
from ..config.declared import value_of
from ..config.loading import Loaded, load
from ..errors import ConfigError, t
from ..families import family_class
from ..machine.hardware import Machine
from ..planner.picker import pick, preset_budget
from ..planner.presets import Predict, Predicted, predict
from ..seam.family import ImageFamily
from ..units import GIB, gib

SHOWN: tuple[names.Key, ...] = (
    ("training", "batch_size"),
    ("training", "gradient_accumulation_steps"),
    ("data", "resolution"),
    ("data", "max_length"),
    ("model", "lora_rank"),
    ("training", "mixed_precision"),
    ("training", "gradient_checkpointing"),
    ("training", "use_8bit_optimizer"),
    ("memory", "base_quantization"),
    ("memory", "embedding_offload"),
    ("memory", "block_streaming"),
    ("memory", "activation_offload"),
    ("memory", "optimizer_offload"),
    ("memory", "vae_tiling"),
)
OF_IMAGES: tuple[names.Key, ...] = (("data", "resolution"), ("memory", "vae_tiling"))
OF_TEXTS: tuple[names.Key, ...] = (("data", "max_length"), ("memory", "embedding_offload"))


@dataclass(frozen=True)
class Row:
    """A preset under the user's config."""

    preset: str
    loaded: Loaded
    predicted: Predicted | None

    def value(self, key: names.Key) -> Any:
        """As the plan solves it, where the preset leaves it open."""
        solved = self.predicted.values if self.predicted else {}
        return solved.get(key, value_of(self.loaded.config, key))


def show(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    path = arguments.config or None
    loaded = load(path, settings, required=())
    chosen = pick(loaded.config.memory, loaded.config.system.device, Machine.read())
    tables = {}
    for family in _families(loaded):
        known = loaded.config.model.base_or_architecture or loaded.config.model.family != "auto"
        # Every family there is would take minutes to predict.
        tables[family] = (
            rows(loaded) if known else rows(load(path, [*settings, f"model.family={family}"], required=()), lambda _: None)
        )
    if arguments.json:
        print(json.dumps({"chosen": chosen.preset, "families": _as_json(tables)}, ensure_ascii=False, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for family, found in tables.items():
        console.print(_table(family, found, chosen.preset))
    console.print(t(pt="aqui: ", en="here: ") + chosen.line(), markup=False)


def rows(loaded: Loaded, predict: Predict = predict) -> list[Row]:
    """The config over each preset. What the user wrote is the same in all of them."""
    found = []
    for name in presets.names():
        over = loaded.with_preset(name)
        found.append(Row(name, over, predict(over)))
    return found


def _families(loaded: Loaded) -> list[str]:
    model = loaded.config.model
    if model.base_or_architecture is None and model.family == "auto":
        return presets.families()
    family = presets.family_of(model.base_or_architecture, model.family)
    if family is None:
        raise ConfigError.said(
            pt="não reconheci a família do modelo base",
            en="the base model's family was not recognised",
            hint_pt=f"diga qual é: modelo.familia=… ({', '.join(presets.families())})",
            hint_en=f"say which: model.family=… ({', '.join(presets.families())})",
        )
    return [family]


def _table(family: str, found: Sequence[Row], chosen: str | None) -> Table:
    known = family_class(family)
    title = t(pt=f"família {family}: {known.title}", en=f"family {family}: {known.title}")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for row in found:
        table.add_column(f"{row.preset} *" if row.preset == chosen else row.preset)
    table.add_row(t(pt="cabe em", en="fits in"), *(gib(preset_budget(row.preset)) for row in found))
    for key in _shown_for(family):
        option = names.options()[key]
        table.add_row(option.shown().partition(".")[2], *(option.said(row.value(key)) for row in found))
    if any(row.predicted for row in found):
        peaks = (_peak(row.predicted) for row in found)
        table.add_row(t(pt="pico previsto", en="predicted peak"), *peaks)
        times = (
            f"{row.predicted.seconds_per_step:.2f} s" if row.predicted and row.predicted.seconds_per_step else ""
            for row in found
        )
        table.add_row(t(pt="por passo", en="per step"), *times)
    return table


def _shown_for(family: str) -> list[names.Key]:
    others = OF_TEXTS if issubclass(family_class(family), ImageFamily) else OF_IMAGES
    return [key for key in SHOWN if key not in others]


def _peak(predicted: Predicted | None) -> str:
    if predicted is None:
        return ""
    return gib(predicted.peak) + ("" if predicted.fits else t(pt=" (não cabe)", en=" (does not fit)"))


def _as_json(tables: dict[str, list[Row]]) -> dict[str, Any]:
    return {family: [_row_as_json(row, _shown_for(family)) for row in found] for family, found in tables.items()}


def _row_as_json(row: Row, shown: Sequence[names.Key]) -> dict[str, Any]:
    return {
        "preset": row.preset,
        "budget_gib": round(preset_budget(row.preset) / GIB, 3),
        "peak_gib": round(row.predicted.peak / GIB, 3) if row.predicted else None,
        "fits": row.predicted.fits if row.predicted else None,
        "seconds_per_step": row.predicted.seconds_per_step if row.predicted else None,
        "settings": {".".join(key): row.value(key) for key in shown},
    }
