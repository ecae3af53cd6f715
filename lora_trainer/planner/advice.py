"""What to change when memory does not suffice: an ordered list, without what is on already.

What costs time comes before what changes numbers, and what changes the result (rank, resolution) last; within these, the
order of the user's own guide: batch, precision, quantised base, checkpointing, optimizer. Amounts come from a plan,
where there is one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import names
from ..config.declared import options, value_of
from ..config.schema import Config
from ..errors import DoesNotFitError, t
from ..seam.technique import CACHING
from ..units import gib
from .ladder import ACCUMULATION, BATCH_SIZE, LADDER, splits

Cost = Literal["time", "numbers", "result"]
"""What a remedy takes: only time; a bounded change of numbers; another result, which needs the user's word."""
PREVIEW = {"preview"}


@dataclass(frozen=True)
class Remedy:
    settings: dict[names.Key, object]
    cost: Cost
    saves: int | None = None
    """Bytes."""

    def text(self) -> str:
        """`treino.tamanho_lote=1 treino.passos_acumulacao_gradiente=4`, ready for the command line."""
        return " ".join(f"{names.options()[key].shown()}={_word(key, value)}" for key, value in self.settings.items())


def remedies(
    config: Config,
    phase: str = "",
    on: frozenset[names.Key] = frozenset(),
    saves: Mapping[names.Key, int] | None = None,
) -> list[Remedy]:
    """`phase`: where memory ended. `on`: options at `auto` that the plan has switched on. `saves`: bytes by option."""
    found, known = [], saves or {}
    for remedy in _all(config, phase):
        first = next(iter(remedy.settings))
        other_s = first not in known if first in _of_texts() else first == _RESOLUTION and _LENGTH in known
        if first not in on and not other_s:
            found.append(Remedy(remedy.settings, remedy.cost, known.get(first)))
    return found


def _of_texts() -> set[names.Key]:
    """Nothing to many bases: told only where the plan knows what they save."""
    return {_LENGTH, *(step.key for step in LADDER if step.chosen[-1].some_bases)}


def already_on(config: Config, on: frozenset[names.Key] = frozenset()) -> list[str]:
    """The memory options in force, as the user would write them."""
    shown = []
    for key, _ in _SWITCHES:
        value = value_of(config, key)
        if key in on or value not in ("auto", "no", False):
            word = _word(key, "yes" if value == "auto" else value)
            shown.append(f"{names.options()[key].shown()}={word}")
    return shown


def explain(
    phase: str,
    causes: Mapping[str, int],
    config: Config,
    on: frozenset[names.Key] = frozenset(),
    saves: Mapping[names.Key, int] | None = None,
) -> list[str]:
    """Phase of the peak, biggest causes, what is on already, what to change; lines to print. Causes in bytes."""
    lines = [t(pt=f"fase do pico: {phase_title(phase)}", en=f"phase of the peak: {phase_title(phase)}")]
    biggest = sorted(causes.items(), key=lambda item: -item[1])[:3]
    if biggest:
        listed = ", ".join(f"{cause_title(name)} {gib(count)}" for name, count in biggest)
        lines.append(t(pt=f"maiores causas: {listed}", en=f"biggest causes: {listed}"))
    if active := already_on(config, on):
        lines.append(t(pt="já ligado: ", en="already on: ") + ", ".join(active))
    return [*lines, *remedy_lines(remedies(config, phase, on, saves))]


def remedy_lines(found: Sequence[Remedy]) -> list[str]:
    if not found:
        text = t(
            pt="tudo o que economiza memória já está ligado: feche outros programas ou use uma placa maior",
            en="everything that saves memory is on already: close other programs or use a larger card",
        )
        return [text]
    lines = [t(pt="o que mudar, nesta ordem:", en="what to change, in this order:")]
    for number, remedy in enumerate(found, 1):
        saved = (
            "" if remedy.saves is None else t(pt=f", economiza {gib(remedy.saves)}", en=f", saves {gib(remedy.saves)}")
        )
        lines.append(f"  {number}. {remedy.text()}  ({_cost(remedy.cost)}{saved})")
    return lines


def does_not_fit(needed: int, available: int, phase: str, lines: Sequence[str]) -> DoesNotFitError:
    """Exit code 3, with both numbers and the way out (`lines` of `explain`)."""
    return DoesNotFitError(
        t(
            pt=f"faltou memória em {phase_title(phase)}: são precisos {gib(needed)} e há {gib(available)}",
            en=f"out of memory in {phase_title(phase)}: {gib(needed)} needed, {gib(available)} there",
        ),
        "\n    ".join(lines),
    )


def phase_title(name: str) -> str:
    titles = {
        "load": t(pt="carregando", en="loading"),
        "cache": t(pt="cache", en="cache"),
        "text_cache": t(pt="cache das legendas", en="caption cache"),
        "latent_cache": t(pt="cache das imagens", en="image cache"),
        "train": t(pt="treino", en="training"),
        "forward": t(pt="passo de ida", en="forward pass"),
        "backward": t(pt="passo de volta", en="backward pass"),
        "optimizer": t(pt="otimizador", en="optimizer"),
        "preview": t(pt="amostra", en="preview"),
        "validation": t(pt="validação", en="validation"),
        "save": t(pt="salvar", en="saving"),
    }
    return titles.get(name, name)


def cause_title(name: str) -> str:
    titles = {
        "frozen": t(pt="pesos congelados", en="frozen weights"),
        "adapter": "LoRA",
        "gradients": t(pt="gradientes", en="gradients"),
        "optimizer": t(pt="otimizador", en="optimizer"),
        "activations": t(pt="ativações", en="activations"),
        "temporary": t(pt="temporários", en="temporaries"),
    }
    return titles.get(name, name)


def _cost(cost: Cost) -> str:
    return {
        "time": t(pt="só fica mais lento", en="only slower"),
        "numbers": t(pt="muda os números dentro de um limite", en="changes the numbers within a bound"),
        "result": t(pt="muda o resultado", en="changes the result"),
    }[cost]


def _word(key: names.Key, value: object) -> str:
    return names.options()[key].said(value) if isinstance(value, (str, tuple)) else f"{value}"


# -- in their order

_RESOLUTION: names.Key = ("data", "resolution")
_LENGTH: names.Key = ("data", "max_length")
_SWITCHES = [(key, option) for key, option in options().items() if option.phases]
"""Options that save memory, in the order in which they are told."""


def _all(config: Config, phase: str) -> Iterator[Remedy]:
    """What costs time, what changes numbers within bounds, what changes the result."""
    yield from _batch(config, phase)
    yield from _rungs(config, phase, lossless=True)
    if config.data.cache_text_encoder == "no":
        yield Remedy({("data", "cache_text_encoder"): "yes"}, "time")
    if config.training.mixed_precision == "no":
        yield Remedy({("training", "mixed_precision"): "auto"}, "numbers")
    yield from _rungs(config, phase, lossless=False)
    yield from _less(config, phase)


def _rungs(config: Config, phase: str, *, lossless: bool) -> Iterator[Remedy]:
    """The tightest value of every option of the ladder that helps in this phase."""
    for step in sorted(LADDER, key=lambda step: step.option.place):
        tightest, now = step.values[-1], value_of(config, step.key)
        useful = phase in step.option.phases and step.chosen[-1].helps(config)
        if step.lossless == lossless and useful and step.tightness(now) < step.tightness(tightest):
            yield Remedy({step.key: tightest}, "time" if lossless else "numbers")


def _batch(config: Config, phase: str) -> Iterator[Remedy]:
    """The same effective batch, one image at a time."""
    size, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    if size > 1 and phase not in CACHING | PREVIEW and splits(config):
        yield Remedy({BATCH_SIZE: 1, ACCUMULATION: size * accumulation}, "time")


def _less(config: Config, phase: str) -> Iterator[Remedy]:
    """Of what is trained: a smaller rank, smaller images, shorter texts."""
    if config.model.lora_rank > 4 and phase not in CACHING | PREVIEW:
        yield Remedy({("model", "lora_rank"): max(4, config.model.lora_rank // 2)}, "result")
    key: names.Key = ("samples", "resolution") if phase in PREVIEW else _RESOLUTION
    sides = (config.samples.resolution if phase in PREVIEW else None) or config.data.resolution
    smaller = tuple(max(64, side * 3 // 4 // 64 * 64) for side in sides)
    if smaller != sides:
        yield Remedy({key: smaller}, "result")
    if config.data.max_length > 64 and phase not in PREVIEW:
        yield Remedy({_LENGTH: max(64, config.data.max_length // 2)}, "result")
