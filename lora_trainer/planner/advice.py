"""What to change when memory does not suffice: an ordered list, without what is on already.

What costs time comes before what changes numbers, and what changes the result (rank, resolution) last; within these, the
order of the user's own guide: batch, precision, quantised base, checkpointing, optimizer. Amounts come from a plan,
where there is one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import names
from ..config.schema import Config
from ..errors import DoesNotFitError, language, t
from ..optim.optimizers import EIGHT_BIT
from ..units import gib
from .options import OPTIMIZER_OFFLOAD, moments_can_leave

Cost = Literal["time", "numbers", "result"]
"""What a remedy takes: only time; a bounded change of numbers; another result, which needs the user's word."""
CACHING, PREVIEW = ("cache", "text_cache", "latent_cache"), ("preview",)


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
    for rule in _RULES:
        for remedy in rule(config, phase):
            first = next(iter(remedy.settings))
            other_s = first not in known if first in _OF_TEXTS else first == _RESOLUTION and _LENGTH in known
            if first not in on and not other_s:
                found.append(Remedy(remedy.settings, remedy.cost, known.get(first)))
    return found


def already_on(config: Config, on: frozenset[names.Key] = frozenset()) -> list[str]:
    """The memory options in force, as the user would write them."""
    shown = []
    for key in _SWITCHES:
        value = getattr(getattr(config, key[0]), key[1])
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
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return names.options()[key].word(value, language()) if isinstance(value, str) else f"{value}"


# -- the rules, in their order

_SWITCHES: tuple[names.Key, ...] = (
    ("training", "gradient_checkpointing"),
    ("memory", "embedding_offload"),
    ("memory", "block_streaming"),
    ("memory", "activation_offload"),
    OPTIMIZER_OFFLOAD,
    ("memory", "vae_tiling"),
    ("memory", "text_streaming"),
    ("memory", "text_quantization"),
    ("memory", "base_quantization"),
    ("training", "use_8bit_optimizer"),
    ("memory", "optimizer_in_backward"),
)
_RESOLUTION: names.Key = ("data", "resolution")
_LENGTH: names.Key = ("data", "max_length")
_OF_TEXTS = (_LENGTH, ("memory", "embedding_offload"))
"""Nothing to families that learn from images: told only where the plan knows what they save."""
_Rule = Callable[[Config, str], Iterator[Remedy]]


def _batch(config: Config, phase: str) -> Iterator[Remedy]:
    """The same effective batch, one image at a time."""
    size, accumulation = config.training.batch_size, config.training.gradient_accumulation_steps
    if size > 1 and phase not in CACHING + PREVIEW:
        yield Remedy(
            {
                ("training", "batch_size"): 1,
                ("training", "gradient_accumulation_steps"): size * accumulation,
            },
            "time",
        )


def _precision(config: Config, phase: str) -> Iterator[Remedy]:
    if config.training.mixed_precision == "no":
        yield Remedy({("training", "mixed_precision"): "auto"}, "numbers")


def _checkpointing(config: Config, phase: str) -> Iterator[Remedy]:
    if config.training.gradient_checkpointing != "yes" and phase not in CACHING + PREVIEW:
        yield Remedy({("training", "gradient_checkpointing"): "yes"}, "time")


def _embeddings(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.embedding_offload != "yes":
        yield Remedy({("memory", "embedding_offload"): "yes"}, "time")


def _streaming(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.block_streaming != 1.0 and phase not in CACHING:
        yield Remedy({("memory", "block_streaming"): 1.0}, "time")


def _offload(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.activation_offload != "yes" and phase not in CACHING + PREVIEW:
        yield Remedy({("memory", "activation_offload"): "yes"}, "time")


def _moments(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.optimizer_offload != "yes" and phase not in CACHING and moments_can_leave(config):
        yield Remedy({OPTIMIZER_OFFLOAD: "yes"}, "time")


def _tiling(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.vae_tiling != "yes" and phase in ("", *CACHING, *PREVIEW):
        yield Remedy({("memory", "vae_tiling"): "yes"}, "time")


def _encoders(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.text_streaming != "yes" and phase in CACHING:
        yield Remedy({("memory", "text_streaming"): "yes"}, "time")


def _text_cache(config: Config, phase: str) -> Iterator[Remedy]:
    if config.data.cache_text_encoder == "no":
        yield Remedy({("data", "cache_text_encoder"): "yes"}, "time")


def _quantised_base(config: Config, phase: str) -> Iterator[Remedy]:
    if config.memory.base_quantization != "nf4" and phase not in CACHING:
        yield Remedy({("memory", "base_quantization"): "nf4"}, "numbers")


def _optimizer(config: Config, phase: str) -> Iterator[Remedy]:
    training = config.training
    small = training.optimizer in (*EIGHT_BIT.values(), "adafactor") or training.use_8bit_optimizer == "yes"
    if not small and training.optimizer in EIGHT_BIT and phase not in CACHING:
        yield Remedy({("training", "use_8bit_optimizer"): "yes"}, "numbers")


def _rank(config: Config, phase: str) -> Iterator[Remedy]:
    if config.model.lora_rank > 4 and phase not in CACHING + PREVIEW:
        yield Remedy({("model", "lora_rank"): max(4, config.model.lora_rank // 2)}, "result")


def _resolution(config: Config, phase: str) -> Iterator[Remedy]:
    key: names.Key = ("samples", "resolution") if phase in PREVIEW else ("data", "resolution")
    sides = config.samples.resolution if phase in PREVIEW else None
    smaller = tuple(max(64, side * 3 // 4 // 64 * 64) for side in sides or config.data.resolution)
    if smaller != (sides or config.data.resolution):
        yield Remedy({key: smaller}, "result")


def _length(config: Config, phase: str) -> Iterator[Remedy]:
    if config.data.max_length > 64 and phase not in PREVIEW:
        yield Remedy({_LENGTH: max(64, config.data.max_length // 2)}, "result")


_RULES: tuple[_Rule, ...] = (
    _batch,
    _checkpointing,
    _embeddings,
    _streaming,
    _offload,
    _moments,
    _tiling,
    _encoders,
    _text_cache,
    _precision,
    _quantised_base,
    _optimizer,
    _rank,
    _resolution,
    _length,
)
