"""`plano`: what a run would need and how it would be done, without training anything or reading a weight."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ..config import names, presets
from ..config.declared import with_values
from ..config.loading import Loaded, load
from ..engine.tracker import CAUSES
from ..errors import ConfigError, t
from ..machine.ram import Ram, ram_notice
from ..machine.speed import Speed, speed_of
from ..planner.advice import cause_title, does_not_fit, explain, phase_title
from ..planner.ask import ask_of_config, not_quantized
from ..planner.caching import OPTIONS
from ..planner.foresee import Foresight, Tried, named, named_gib
from ..planner.ladder import BATCH_SIZE
from ..planner.picker import Choice, settle
from ..planner.plan import CHECKPOINTING, QUANTIZATION
from ..seam.technique import CACHING
from ..units import GIB, gib, in_gib
from ._amount import Amount, amount_of, disk_bytes


@dataclass(frozen=True)
class Planned:
    """A config with its family, the card's share of it, and what was foreseen."""

    loaded: Loaded
    choice: Choice
    family: str | None
    found: Foresight
    speed: Speed
    amount: Amount | None = None
    """None without images to count; rows of texts are known once they are tokenised."""

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.speed.seconds(self.found.flops, self.found.transferred)

    @property
    def tokens_per_second(self) -> float | None:
        """In full rows; None for images."""
        training, data = self.loaded.config.training, self.loaded.config.data
        tokens = training.batch_size * training.gradient_accumulation_steps * data.max_length
        return tokens / self.seconds if self.found.texts else None

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        training = self.loaded.config.training
        return training.gradient_accumulation_steps * -(-training.batch_size // self.found.micro_batch)

    def seconds_of(self, one: Tried) -> float:
        return self.speed.seconds(one.flops, one.transferred)

    @property
    def allowance(self) -> int:
        """Bytes that tensors do not show, at the peak."""
        return self.choice.allowance.total(self.found.peak) - self.found.peak

    @property
    def values(self) -> dict[names.Key, Any]:
        """All options solved, those of the caching phase too where they are on."""
        encoding = {name: self.found.encoding.get(name) for name in OPTIONS}
        words = {name: "yes" if value is True else value for name, value in encoding.items()}
        on = {("memory", name): word for name, word in words.items() if word not in (None, False, "no")}
        return {**self.found.values, **on}

    @property
    def disk(self) -> int:
        return disk_bytes(self.found, self.loaded.config, self.amount)


def show(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    loaded = load(arguments.config or None, settings, required=())
    planned = plan(loaded)
    if arguments.json:
        print(json.dumps(as_json(planned), ensure_ascii=False, indent=2))
    else:
        _print(planned)
    if not planned.found.fits:
        found, available = planned.found, planned.choice.available
        assert available is not None
        on = frozenset(key for key, value in found.values.items() if value not in ("no", None))
        causes, solved = found.phases[found.worst_phase].causes, with_values(
            planned.loaded.config, {**found.values, BATCH_SIZE: found.micro_batch}
        )
        lines = explain(found.worst_phase, causes, solved, on, found.saves)
        raise does_not_fit(found.peak, available, found.worst_phase, lines)


def plan(loaded: Loaded) -> Planned:
    """Pick, open the architecture, solve and simulate."""
    model = loaded.config.model
    if not model.base_or_architecture and model.family == "auto":
        raise ConfigError.said(
            pt="diga o que planejar",
            en="say what to plan",
            hint_pt="dê --config, ou modelo.modelo_base=…, ou só a família: modelo.familia=sdxl",
            hint_en="give --config, or model.base_model=…, or only the family: model.family=sdxl",
        )
    return plan_for(*settle(loaded))


def plan_for(loaded: Loaded, choice: Choice) -> Planned:
    """For a card that was chosen already."""
    config, found = loaded.config, ask_of_config(loaded, choice)
    family = presets.family_of(config.model.base_or_architecture, config.model.family)
    amount = None if found.texts else amount_of(config)
    return Planned(loaded, choice, family, found, speed_of(choice.card, config.memory.vram), amount)


def as_json(planned: Planned) -> dict[str, Any]:
    found, choice, amount = planned.found, planned.choice, planned.amount
    return {
        "fits": found.fits,
        "family": planned.family,
        "peak_gib": in_gib(found.peak),
        "peak_phase": found.worst_phase,
        "allowance_gib": in_gib(planned.allowance),
        "available_gib": None if choice.budget is None else in_gib(choice.budget),
        "host_gib": in_gib(found.host),
        "disk_gib": in_gib(planned.disk),
        "preset": choice.preset,
        "micro_batch": found.micro_batch,
        "accumulation": planned.accumulation,
        "max_length": planned.loaded.config.data.max_length if found.texts else None,
        "tokens_per_s": planned.tokens_per_second and round(planned.tokens_per_second, 1),
        "lossless": found.lossless,
        "seconds_per_step": round(planned.seconds, 3),
        "steps": amount and amount.steps,
        "seconds": amount and round(planned.seconds * amount.steps, 1),
        "plan": named(planned.values),
        "phases": found.phases_in_gib(),
        "without": named_gib(found.without),
        "below": [_tried_as_json(planned, one) for one in found.below],
        "saves": named_gib(found.saves),
        "tried": [_tried_as_json(planned, one) for one in found.tried],
    }


def _tried_as_json(planned: Planned, one: Tried) -> dict[str, Any]:
    return {
        "plan": named(one.values),
        "micro_batch": one.micro_batch,
        "peak_gib": in_gib(one.peak),
        "seconds_per_step": round(planned.seconds_of(one), 3),
        "simulated": one.simulated,
    }


# -- for people


def _print(planned: Planned) -> None:
    console, found = Console(highlight=False, soft_wrap=True), planned.found
    console.print(f"{planned.family} · {planned.choice.line()}", style="bold", markup=False)
    console.print(_work(planned), markup=False)
    console.print(_phase_table(found))
    console.print(_verdict(planned), style="green" if found.fits else "red", markup=False)
    chosen = settings_text(planned.values)
    if found.micro_batch < planned.loaded.config.training.batch_size:
        chosen = f"{at_a_time(found.micro_batch)}, {chosen}"
    console.print(t(pt=f"plano: {chosen}", en=f"plan: {chosen}"), markup=False)
    for line in [*_reasons(planned), *_costs(planned)]:
        console.print(line, markup=False)
    if found.below and found.fits:
        title = t(pt="se faltar memória no meio do treino, nesta ordem:", en="if memory runs out in mid-run, in this order:")
        console.print(title, markup=False)
        console.print(_below_table(planned))
    if any(not one.simulated for one in found.below) or found.without:
        console.print(t(pt="≈ calculado a partir de outra simulação", en="≈ worked out from another simulation"), style="dim")


def _work(planned: Planned) -> str:
    """What a step does."""
    config = planned.loaded.config
    count, times = planned.found.micro_batch, planned.accumulation
    size = "×".join(map(str, config.data.resolution))
    what = t(pt=f"imagem(ns) de {size}", en=f"image(s) of {size}")
    if planned.found.texts:
        what = t(pt=f"linha(s) de {config.data.max_length} tokens", en=f"row(s) of {config.data.max_length} tokens")
    rank = config.model.lora_rank
    return t(
        pt=f"passo: {times} × {count} {what}, LoRA de rank {rank}", en=f"step: {times} × {count} {what}, LoRA of rank {rank}"
    )


def _verdict(planned: Planned) -> str:
    found, budget = planned.found, planned.choice.budget
    parts = gib(found.peak), gib(planned.allowance), gib(planned.choice.allowance.total(found.peak))
    verdict = t(
        pt="pico dos tensores {} + contexto e folga {} = {}", en="peak of tensors {} + context and slack {} = {}"
    ).format(*parts)
    if budget is not None:
        fits = t(pt="cabe", en="fits") if found.fits else t(pt="não cabe", en="does not fit")
        verdict += t(pt=f", de {gib(budget)}: {fits}", en=f", of {gib(budget)}: {fits}")
    return verdict


def _reasons(planned: Planned) -> Iterator[str]:
    """Why each technique is on: the peak without it."""
    available = planned.choice.available
    for key, peak in planned.found.without.items():
        word = _short({key: planned.found.values[key]})
        room = "" if available is None else t(pt=f" (há {gib(available)})", en=f" ({gib(available)} there)")
        yield t(pt=f"  {word}: sem isso ≈ {gib(peak)}{room}", en=f"  {word}: without it ≈ {gib(peak)}{room}")
    if CHECKPOINTING in planned.values and CHECKPOINTING not in planned.found.without and len(planned.found.without):
        word = _short({CHECKPOINTING: planned.values[CHECKPOINTING]})
        yield t(pt=f"  {word}: o que vem acima precisa disso", en=f"  {word}: what is above needs it")
    if notice := not_quantized(planned.loaded.config, planned.found.values):
        yield f"  {notice}"
    asked, used = planned.loaded.config.memory.base_quantization, planned.found.values[QUANTIZATION]
    if used == asked != "no" and QUANTIZATION not in planned.loaded.written:
        word, name = _short({QUANTIZATION: used}), planned.choice.preset
        yield t(pt=f"  {word}: do preset {name}", en=f"  {word}: the preset {name}'s")
    elif not planned.found.lossless:
        yield t(
            pt="  nada que preserve todos os números bastou: o que muda os números fica dentro de um limite",
            en="  nothing that keeps every number was enough: what changes them does so within a bound",
        )


def _costs(planned: Planned) -> Iterator[str]:
    amount, ram = planned.amount, Ram.read()
    per_step, source = f"{planned.seconds:.2f} s", planned.speed.source
    speed = "" if planned.tokens_per_second is None else f"; {planned.tokens_per_second:.0f} tokens/s"
    yield t(pt=f"tempo: cerca de {per_step} por passo ({source})", en=f"time: about {per_step} a step ({source})") + (
        speed
        if amount is None
        else t(
            pt=f"; {amount.steps} passos ({amount.images} imagens): {_duration(planned.seconds * amount.steps)}",
            en=f"; {amount.steps} steps ({amount.images} images): {_duration(planned.seconds * amount.steps)}",
        )
    )
    host, free, disk = gib(planned.found.host), gib(ram.available), gib(planned.disk)
    yield t(
        pt=f"RAM ao lado da placa: {host} (há {free} livres); disco: cerca de {disk}",
        en=f"host RAM beside the card: {host} ({free} free); disk: about {disk}",
    )
    if notice := ram_notice(planned.found.host, ram):
        yield notice


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02d} min" if hours else f"{rest // 60} min {rest % 60:02d} s"


def _phase_table(found: Foresight) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("GiB", no_wrap=True)
    for title in ("total", *map(_column, CAUSES), "RAM"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, peak in found.phases.items():
        cells = [peak.total, *(peak.causes[cause] for cause in CAUSES), peak.host]
        style = "bold" if name == found.worst_phase else ""
        table.add_row(phase_title(name), *(f"{cell / GIB:.2f}" if cell else "" for cell in cells), style=style)
    return table


def _column(cause: str) -> str:
    short = {
        "frozen": "base",
        "gradients": t(pt="grad.", en="grads"),
        "optimizer": t(pt="otim.", en="optim."),
        "activations": t(pt="ativ.", en="activ."),
        "temporary": "temp.",
    }
    return short.get(cause, cause_title(cause))


def _below_table(planned: Planned) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    before = planned.found.values
    batch = planned.found.micro_batch
    peak = max(phase.total for name, phase in planned.found.phases.items() if name not in CACHING)  # the rungs are of training
    for one in planned.found.below:
        changed = {key: value for key, value in one.values.items() if before.get(key) != value}
        change = _short(changed)
        if one.micro_batch != batch:
            change = at_a_time(one.micro_batch)
        mark, seconds = "" if one.simulated else "≈ ", planned.seconds_of(one) - planned.seconds
        saved = t(pt=f"economiza {gib(peak - one.peak)}", en=f"saves {gib(peak - one.peak)}")
        table.add_row(f"  {change}", f"{mark}{gib(one.peak)}", saved, f"{seconds:+.2f} s")
        before, batch = one.values, one.micro_batch
    return table


def at_a_time(count: int) -> str:
    return t(pt=f"{count} exemplo(s) por vez", en=f"{count} example(s) at a time")


def settings_text(values: Mapping[names.Key, Any]) -> str:
    on = {key: value for key, value in values.items() if value not in ("no", None)}
    return _short(on) or t(pt="tudo na placa, sem economias", en="all on the card, no savings")


def _short(values: Mapping[names.Key, Any]) -> str:
    shown = [(names.options()[key], value) for key, value in values.items()]
    return ", ".join(f"{option.shown().partition('.')[2]}: {option.said(value)}" for option, value in shown)
