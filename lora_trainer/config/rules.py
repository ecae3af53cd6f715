"""What one option says against another, and what a value's type alone cannot tell.

Rules about the base model's family are the family's, and are checked once the base is known.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import plugins
from ..choices.optimizers import OPTIMIZERS
from ..errors import t
from ..files.kinds import signatures
from . import names
from .declared import Conflict, conflicts
from .entries import Entry
from .fields import printable, value_of
from .names import Key
from .report import Both, Problem, Where, filled
from .schema import Config

MAX_NAME_BYTES = 120

_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


@dataclass(frozen=True)
class Facts:
    """The config, and what the user wrote of it."""

    config: Config
    entries: Mapping[Key, Entry]
    failed: frozenset[Key]
    """Options already complained about: rules that touch them stay silent."""

    def where(self, key: Key) -> Where | None:
        return self.entries[key].where if key in self.entries else None

    def name(self, key: Key) -> str:
        """As the user wrote it, else in the language of the messages."""
        return self.entries[key].written if key in self.entries else names.options()[key].shown()

    def value(self, key: Key, word: str) -> str:
        """`agendador: cosseno`, for the hints."""
        option = names.options()[key]
        lang = option.language_of(self.name(key))
        return f"{self.name(key)}: {option.word(word, lang)}"


DELETE_FIRST = ("apague `{first}`", "delete `{first}`")
DELETE_SECOND = ("apague `{second}`", "delete `{second}`")
DELETE_ONE = ("apague um dos dois", "delete one of the two")


def _same(one: str | None, other: str | None) -> bool:
    return bool(one and other) and os.path.realpath(str(one)) == os.path.realpath(str(other))


_CONFLICTS = (
    Conflict(
        ("data", "cache_text_encoder"), ("model", "train_text_encoder"),
        lambda c: c.data.cache_text_encoder == "yes" and c.model.train_text_encoder,
        ("`{first}` e `{second}` não andam juntos: um codificador em treino muda a cada passo",
         "`{first}` and `{second}` exclude each other: an encoder in training changes at every step"),
        ("use {first}: auto", "use {first}: auto")),
    Conflict(
        ("training", "debiased"), ("training", "min_snr_gamma"),
        lambda c: c.training.debiased and c.training.min_snr_gamma is not None,
        ("`{first}` e `{second}` dão pesos diferentes à mesma perda",
         "`{first}` and `{second}` weight the same loss in two ways"),
        ("fique com um dos dois", "keep one of the two")),
    Conflict(
        ("training", "timestep_min"), ("training", "timestep_max"),
        lambda c: c.training.timestep_min >= c.training.timestep_max,
        ("`{first}` ({c.training.timestep_min}) precisa ser menor que `{second}` ({c.training.timestep_max})",
         "`{first}` ({c.training.timestep_min}) must be below `{second}` ({c.training.timestep_max})")),
    Conflict(
        ("training", "ema"), ("training", "optimizer"),
        lambda c: c.training.ema > 0 and OPTIMIZERS[c.training.optimizer].averages,
        ("`{first}` sobra com `{second}: {c.training.optimizer}`, que já entrega uma média dos passos",
         "`{first}` is one too many with `{second}: {c.training.optimizer}`, which already gives an average of the steps"),
        DELETE_FIRST),
    Conflict(
        ("output", "dir"), ("data", "data_dir"),
        lambda c: _same(c.output.dir, c.data.data_dir),
        ("`{first}` é a própria pasta das imagens: as amostras virariam imagens de treino",
         "`{first}` is the image folder itself: previews would become training images"),
        ("escolha outra pasta em {first}", "choose another folder in {first}")),
    Conflict(
        ("data", "regularization_dir"), ("data", "data_dir"),
        lambda c: _same(c.data.regularization_dir, c.data.data_dir),
        ("`{first}` é a mesma pasta que `{second}`: cada imagem treinaria duas vezes",
         "`{first}` is the same folder as `{second}`: every image would train twice"),
        ("ponha em {first} imagens comuns da classe, em outra pasta, ou apague a chave",
         "give {first} ordinary images of the class, in another folder, or delete the key")),
    Conflict(
        ("data", "mask_dir"), ("data", "mask"),
        lambda c: c.data.mask_dir is not None and c.data.mask != "files",
        ("`{first}` pede `{second}: arquivos`", "`{first}` needs `{second}: files`"),
        ("mude a máscara, ou apague a pasta", "change the mask, or delete the folder")),
    Conflict(
        ("model", "adapter_kind"), ("model", "dora"),
        lambda c: c.model.adapter_kind != "lora" and c.model.dora,
        ("`{first}: {c.model.adapter_kind}` não anda com `{second}`, que é do LoRA",
         "`{first}: {c.model.adapter_kind}` excludes `{second}`, which belongs to LoRA"),
        DELETE_SECOND),
    Conflict(
        ("model", "adapter_kind"), ("training", "lora_plus_ratio"),
        lambda c: c.model.adapter_kind != "lora" and c.training.lora_plus_ratio != 1,
        ("`{second}` vale para a matriz B do LoRA, que `{first}: {c.model.adapter_kind}` não tem",
         "`{second}` is about LoRA's matrix B, which `{first}: {c.model.adapter_kind}` has not"),
        DELETE_SECOND),
    Conflict(
        ("model", "lora_init"), ("model", "adapter_kind"),
        lambda c: c.model.lora_init == "pissa" and c.model.adapter_kind != "lora",
        ("`{first}: pissa` é do LoRA; `{second}: {c.model.adapter_kind}` começa de outro jeito",
         "`{first}: pissa` belongs to LoRA; `{second}: {c.model.adapter_kind}` starts in another way"),
        DELETE_FIRST),
    Conflict(
        ("model", "lora_init"), ("model", "dora"),
        lambda c: c.model.lora_init == "pissa" and c.model.dora,
        ("`{first}: pissa` não anda com `{second}`, que mede a norma do peso inteiro",
         "`{first}: pissa` excludes `{second}`, which measures the norm of the whole weight"),
        DELETE_ONE),
    Conflict(
        ("model", "lora_init"), ("model", "lora_dropout"),
        lambda c: c.model.lora_init == "pissa" and c.model.lora_dropout > 0,
        ("`{first}: pissa` não anda com `{second}`: o que se apaga seria parte do próprio modelo base",
         "`{first}: pissa` excludes `{second}`: what is dropped would be a part of the base itself"),
        DELETE_SECOND),
    Conflict(
        ("model", "lora_init"), ("model", "initial_lora"),
        lambda c: c.model.lora_init == "pissa" and c.model.initial_lora is not None,
        ("`{first}: pissa` e `{second}` são dois começos para o mesmo LoRA",
         "`{first}: pissa` and `{second}` are two starts of the same LoRA"),
        ("para continuar um LoRA feito com pissa, apague `{first}` e dobre o rank",
         "to continue a LoRA made with pissa, delete `{first}` and double the rank")),
    Conflict(
        ("model", "lora_rules"), ("training", "optimizer"),
        lambda c: OPTIMIZERS[c.training.optimizer].finds_rate and any("rate" in rule for rule in c.model.lora_rules),
        ("`{first}` dá taxas próprias, e o {c.training.optimizer} usa uma só, que ele mesmo acha",
         "`{first}` gives rates of their own, and {c.training.optimizer} uses a single one, which it finds itself"),
        ("apague as taxas das regras, ou use outro otimizador", "delete the rules' rates, or use another optimizer")),
    Conflict(
        ("training", "zero_terminal_snr"), ("model", "prediction_type"),
        lambda c: c.training.zero_terminal_snr and c.model.prediction_type == "epsilon",
        ("`{first}` só funciona com predição v: com SNR zero, epsilon nada diz da imagem",
         "`{first}` works only with v prediction: at zero SNR epsilon says nothing of the image"),
        ("apague `{first}` se o modelo base prevê epsilon", "delete `{first}` if the base model predicts epsilon")),
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """What a value's type alone cannot tell. {name}, {value}, {doc} of the option and {wrong} may stand in the texts."""

    key: Key
    wrong: Callable[[Any], Any]
    """What is wrong with a value; falsy where nothing is."""
    problem: Both
    hint: Both = ("", "")


def _bad_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        return str(error)
    return ""


def _bad_rule(rules: list[dict[str, Any]]) -> str:
    errors = ((rule["target"], _bad_expression(rule["target"])) for rule in rules)
    return next((f"`{target}` ({error})" for target, error in errors if error), "")


def _unknown_family(family: str) -> str:
    """The hint."""
    available = ["auto", *plugins.available("lora_trainer.families")]
    if family in available:
        return ""
    listed = t(pt="famílias: ", en="families: ") + ", ".join(available)
    return names.did_you_mean(names.nearest(family, available, 0.5)) or listed


def _no_length(asked: int | str) -> str:
    """The hint, for what no family takes; whether this one does, is known with the base."""
    lengths = sorted({length for signature in signatures().values() for length in signature.caption_tokens})
    if asked in ("auto", *lengths):
        return ""
    return t(pt="use auto ou ", en="use auto or ") + ", ".join(map(str, lengths))


def _no_colour(colour: str) -> bool:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(colour)
    except ValueError:
        return True
    return False


_CHECKS = (
    Check(
        ("training", "lr_warmup"), lambda warmup: warmup > 1 and not warmup.is_integer(),
        ("`{name}`: {value:g} não é fração (menos de 1) nem número inteiro de passos",
         "`{name}`: {value:g} is neither a share (below 1) nor a whole number of steps"),
        ("por exemplo 0.1, ou 100", "for example 0.1, or 100")),
    Check(
        ("model", "family"), _unknown_family,
        ("não conheço a família `{value}`", "unknown family `{value}`"), ("{wrong}", "{wrong}")),
    Check(
        ("data", "max_caption_tokens"), _no_length,
        ("`{name}`: {value} não serve para nenhuma família", "`{name}`: {value} suits no family"), ("{wrong}", "{wrong}")),
    Check(
        ("model", "lora_targets"), _bad_expression,
        ("`{name}`: expressão regular inválida ({wrong})", "`{name}`: invalid regular expression ({wrong})"),
        ("{doc}", "{doc}")),
    Check(
        ("model", "lora_rules"), _bad_rule,
        ("`{name}`: expressão regular inválida em {wrong}", "`{name}`: invalid regular expression in {wrong}")),
    Check(
        ("data", "background"), _no_colour,
        ("`{name}`: não conheço a cor `{value}`", "`{name}`: unknown colour `{value}`"),
        ("use white, black ou '#rrggbb'", "use white, black or '#rrggbb'")),
    Check(
        ("training", "betas"), lambda betas: [beta for beta in betas or () if not 0 <= beta < 1],
        ("`{name}`: esperava valores de 0 até menos de 1, veio {wrong[0]:g}",
         "`{name}`: expected values from 0 to below 1, got {wrong[0]:g}"),
        ("o usual é [0.9, 0.999]", "[0.9, 0.999] is usual")),
)  # fmt: skip


def contradictions(facts: Facts) -> list[Problem]:
    """What options say against each other, and what is wrong with single values."""
    return [*_conflicting(facts), *_wrong(facts)]


def _conflicting(facts: Facts) -> Iterator[Problem]:
    for conflict in (*_CONFLICTS, *conflicts()):
        if conflict.holds(facts.config) and not facts.failed & {conflict.first, conflict.second}:
            one, other = facts.where(conflict.first), facts.where(conflict.second)
            message, hint = conflict.told(facts.name(conflict.first), facts.name(conflict.second), facts.config)
            yield Problem(message, one or other, hint, other if one else None)


def _wrong(facts: Facts) -> Iterator[Problem]:
    for check in _CHECKS:
        value = value_of(facts.config, check.key)
        if check.key in facts.entries and check.key not in facts.failed and (wrong := check.wrong(value)):
            doc = names.options()[check.key].doc
            told = {"name": facts.name(check.key), "value": value, "wrong": wrong, "doc": doc}
            yield Problem(filled(check.problem, told), facts.where(check.key), filled(check.hint, told))


def inside_run_folder(facts: Facts, name: str) -> Iterator[Problem]:
    """Inputs that lie in this run's own folder, which a later start moves aside with all that is in it."""
    run = Path(os.path.realpath(os.path.join(facts.config.output.dir, name)))
    own_name: Key = ("output", "name")
    for key, option in names.options().items():
        value = value_of(facts.config, key)
        if option.kind not in names.INPUT_KINDS or key in facts.failed or not value or not name.strip():
            continue
        path = Path(os.path.realpath(value))
        if os.path.isabs(value) and (path == run or run in path.parents):
            yield Problem.at(
                facts.where(key),
                pt=f"`{facts.name(key)}` fica na pasta desta execução ({run}), que um novo início põe de lado inteira",
                en=f"`{facts.name(key)}` lies in this run's own folder ({run}), which a new start moves aside whole",
                hint=t(
                    pt=f"mude o arquivo ou a pasta de lugar, ou troque `{facts.name(own_name)}`",
                    en=f"move the file or folder elsewhere, or change `{facts.name(own_name)}`",
                ),
                also=facts.where(own_name),
            )


def name_problem(name: str, where: Where | None) -> Problem | None:
    """The output's name becomes a file name on every system the file may travel to."""
    bad = sorted({c for c in name if c in '<>:"/\\|?*' or ord(c) < 32 or printable(c) != c})
    if bad:
        shown, name = " ".join(repr(c)[1:-1] if printable(c) == c else printable(c) for c in bad), printable(name)
        pt, en = f"`{name}` não serve para um arquivo: tem {shown}", f"`{name}` cannot name a file: it has {shown}"
    elif not name.strip() or name != name.strip() or name.endswith(".") or name.startswith("."):
        pt = f"`{name}` não serve para um arquivo: vazio, ou com ponto ou espaço na ponta"
        en = f"`{name}` cannot name a file: empty, or with a dot or space at an end"
    elif name.split(".")[0].lower() in _RESERVED:
        pt, en = f"`{name}` é reservado no Windows", f"`{name}` is reserved on Windows"
    elif len(name.encode()) > MAX_NAME_BYTES:
        pt = f"`{name[:20]}…` é longo demais: até {MAX_NAME_BYTES} bytes"
        en = f"`{name[:20]}…` is too long: up to {MAX_NAME_BYTES} bytes"
    else:
        return None
    hint = t(
        pt="use letras, números, espaço, `-`, `_` e `.` em `saida.nome`",
        en="use letters, numbers, space, `-`, `_` and `.` in `output.name`",
    )
    return Problem.at(where, pt=f"o nome {pt}", en=f"the name {en}", hint=hint)
