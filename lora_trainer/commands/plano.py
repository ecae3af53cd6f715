"""`plano`: what a run would need and how it would be done, without training anything or reading a weight."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..card import GIB, Card
from ..config import names, presets
from ..config.loading import Loaded, load
from ..errors import ConfigError, t
from ..hardware import Precision, choose_precision
from ..memory.advice import cause_title, does_not_fit, explain, phase_title
from ..memory.allowance import user_cache
from ..memory.foresee import Foresight, Question, foresee, known_answer, named
from ..memory.speed import Speed, speed_of
from ..picker import Choice, settle
from ..progress import gib
from ..sources import open_source
from ..tracker import CAUSES

IMITATED = Card("", (8, 0))
"""A card that is not here is taken for one of the RTX 30 series: bf16."""


@dataclass(frozen=True)
class Planned:
    """A config with its family, the card's share of it, and what was foreseen."""

    loaded: Loaded
    choice: Choice
    family: str | None
    found: Foresight
    speed: Speed

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.speed.seconds(self.found.flops, self.found.transferred)

    @property
    def allowance(self) -> int:
        """Bytes that tensors do not show, at the peak."""
        return self.choice.allowance.total(self.found.peak) - self.found.peak


def show(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    loaded = load(Path(arguments.config) if arguments.config else None, settings, required=())
    planned = plan(loaded)
    if arguments.json:
        print(json.dumps(as_json(planned), ensure_ascii=False, indent=2))
    else:
        _print(planned)
    if not planned.found.fits:
        found, available = planned.found, planned.choice.available
        assert available is not None
        on = frozenset(key for key, value in found.values.items() if value not in ("no", None))
        lines = explain(found.worst_phase, found.phases[found.worst_phase].causes, planned.loaded.config, on, {})
        raise does_not_fit(found.peak, available, found.worst_phase, lines)


def plan(loaded: Loaded) -> Planned:
    """Pick, open the architecture, solve and simulate."""
    model = loaded.config.model
    if not model.base_model and model.family == "auto":
        raise ConfigError(
            t(pt="diga o que planejar", en="say what to plan"),
            t(
                pt="dê --config, ou modelo.modelo_base=…, ou só a família: modelo.familia=sdxl",
                en="give --config, or model.base_model=…, or only the family: model.family=sdxl",
            ),
        )
    loaded, choice = settle(loaded)
    config, folder = loaded.config, user_cache() / "plans"
    source = replace(open_source(config.model.base_model), planning=True) if config.model.base_model else None
    question = Question(
        config,
        source,
        planned_precision(loaded, choice).name,
        config.training.batch_size,
        config.training.gradient_accumulation_steps,
        config.data.resolution,
        bool(config.samples.prompts),
        config.data.validation_fraction > 0,
        choice.available,
        frozenset(loaded.written),
    )
    found = known_answer(question, folder) or foresee(question, folder)
    family = presets.family_of(config.model.base_model, config.model.family)
    return Planned(loaded, choice, family, found, speed_of(choice.card, config.memory.vram))


def planned_precision(loaded: Loaded, choice: Choice) -> Precision:
    """As the run would choose it; on a card that is only imitated, as a common card of today would."""
    setting = loaded.config.training.mixed_precision
    if choice.card is None and loaded.config.memory.vram is not None:
        return choose_precision(setting, torch.device("cuda"), IMITATED)
    return choose_precision(setting, choice.device, choice.card)


def as_json(planned: Planned) -> dict[str, Any]:
    found, choice = planned.found, planned.choice
    return {
        "fits": found.fits,
        "family": planned.family,
        "peak_gib": _gib(found.peak),
        "peak_phase": found.worst_phase,
        "allowance_gib": _gib(planned.allowance),
        "available_gib": None if choice.budget is None else _gib(choice.budget),
        "host_gib": _gib(found.host),
        "preset": choice.preset,
        "lossless": found.lossless,
        "seconds_per_step": round(planned.seconds, 3),
        "plan": named(found.values),
        "phases": {
            name: {"total": _gib(peak.total), "host": _gib(peak.host), **{c: _gib(n) for c, n in peak.causes.items()}}
            for name, peak in found.phases.items()
        },
        "tried": [
            {
                "plan": named(one.values),
                "peak_gib": _gib(one.peak),
                "seconds_per_step": round(planned.speed.seconds(one.flops, one.transferred), 3),
            }
            for one in found.tried
        ],
    }


def _print(planned: Planned) -> None:
    console, found = Console(highlight=False, soft_wrap=True), planned.found
    console.print(f"{planned.family} · {planned.choice.line()}", style="bold", markup=False)
    console.print(_phase_table(found))
    total, budget = planned.choice.allowance.total(found.peak), planned.choice.budget
    shown = gib(found.peak), gib(planned.allowance), gib(total)
    verdict = t(
        pt="pico dos tensores {} + contexto e folga {} = {}", en="peak of tensors {} + context and slack {} = {}"
    ).format(*shown)
    if budget is not None:
        fits = t(pt="cabe", en="fits") if found.fits else t(pt="não cabe", en="does not fit")
        verdict += t(pt=f", de {gib(budget)}: {fits}", en=f", of {gib(budget)}: {fits}")
    console.print(verdict, style="green" if found.fits else "red", markup=False)
    chosen = _settings(found.values)
    console.print(t(pt=f"plano: {chosen}", en=f"plan: {chosen}"), markup=False)
    seconds = f"{planned.seconds:.2f} s"
    console.print(
        t(
            pt=f"por passo do otimizador: cerca de {seconds} ({planned.speed.source}); RAM ao lado: {gib(found.host)}",
            en=f"per optimizer step: about {seconds} ({planned.speed.source}); host RAM beside it: {gib(found.host)}",
        ),
        markup=False,
    )
    for one in found.tried:
        cost = planned.speed.seconds(one.flops, one.transferred)
        console.print(f"  {gib(one.peak):>9}  {cost:6.2f} s  {_settings(one.values)}", markup=False)


def _phase_table(found: Foresight) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("GiB")
    for title in (t(pt="total", en="total"), *map(cause_title, CAUSES), "RAM"):
        table.add_column(title, justify="right")
    for name, peak in found.phases.items():
        cells = [peak.total, *(peak.causes[cause] for cause in CAUSES), peak.host]
        style = "bold" if name == found.worst_phase else ""
        table.add_row(phase_title(name), *(f"{cell / GIB:.2f}" if cell else "" for cell in cells), style=style)
    return table


def _settings(values: Mapping[names.Key, Any]) -> str:
    shown = [(names.options()[key], value) for key, value in values.items() if value not in ("no", None)]
    words = [f"{option.shown().partition('.')[2]}: {_word(option, value)}" for option, value in shown]
    return ", ".join(words) or t(pt="tudo na placa, sem economias", en="all on the card, no savings")


def _word(option: names.Option, value: Any) -> str:
    return option.word(value, option.language_of(option.shown())) if isinstance(value, str) else f"{value:g}"


def _gib(count: int) -> float:
    return round(count / GIB, 4)
