"""What one option says against another, and what a value's type alone cannot tell.

Rules about the base model's family are the family's, and are checked once the base is known.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import plugins
from ..errors import t
from . import names
from .declared import Conflict, conflicts
from .entries import Entry
from .fields import printable
from .names import Key
from .report import Problem, Where
from .schema import Config

MAX_NAME_BYTES = 120
OUTPUTS: tuple[Key, ...] = (("data", "cache_dir"), ("output", "dir"))
"""Paths that are written to."""

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


def _same(one: str | None, other: str | None) -> bool:
    return bool(one and other) and os.path.realpath(str(one)) == os.path.realpath(str(other))


_CONFLICTS = (
    Conflict(
        ("data", "cache_text_encoder"),
        ("model", "train_text_encoder"),
        lambda c: c.data.cache_text_encoder == "yes" and c.model.train_text_encoder,
        (
            "`{first}` e `{second}` não andam juntos: um codificador em treino muda a cada passo",
            "`{first}` and `{second}` exclude each other: an encoder in training changes at every step",
        ),
        ("use {first}: auto", "use {first}: auto"),
    ),
    Conflict(
        ("training", "debiased"),
        ("training", "min_snr_gamma"),
        lambda c: c.training.debiased and c.training.min_snr_gamma is not None,
        (
            "`{first}` e `{second}` dão pesos diferentes à mesma perda",
            "`{first}` and `{second}` weight the same loss in two ways",
        ),
        ("fique com um dos dois", "keep one of the two"),
    ),
    Conflict(
        ("training", "timestep_min"),
        ("training", "timestep_max"),
        lambda c: c.training.timestep_min >= c.training.timestep_max,
        (
            "`{first}` ({c.training.timestep_min}) precisa ser menor que `{second}` ({c.training.timestep_max})",
            "`{first}` ({c.training.timestep_min}) must be below `{second}` ({c.training.timestep_max})",
        ),
    ),
    Conflict(
        ("training", "ema"),
        ("training", "optimizer"),
        lambda c: c.training.ema > 0 and c.training.optimizer == "schedulefree_adamw",
        (
            "`{first}` sobra com `{second}: schedulefree_adamw`, que já entrega uma média dos passos",
            "`{first}` is one too many with `{second}: schedulefree_adamw`, which already gives an average of the steps",
        ),
        ("apague `{first}`", "delete `{first}`"),
    ),
    Conflict(
        ("output", "dir"),
        ("data", "data_dir"),
        lambda c: _same(c.output.dir, c.data.data_dir),
        (
            "`{first}` é a própria pasta das imagens: as amostras virariam imagens de treino",
            "`{first}` is the image folder itself: previews would become training images",
        ),
        ("escolha outra pasta em {first}", "choose another folder in {first}"),
    ),
    Conflict(
        ("data", "regularization_dir"),
        ("data", "data_dir"),
        lambda c: _same(c.data.regularization_dir, c.data.data_dir),
        (
            "`{first}` é a mesma pasta que `{second}`: cada imagem treinaria duas vezes",
            "`{first}` is the same folder as `{second}`: every image would train twice",
        ),
        (
            "ponha em {first} imagens comuns da classe, em outra pasta, ou apague a chave",
            "give {first} ordinary images of the class, in another folder, or delete the key",
        ),
    ),
    Conflict(
        ("data", "mask_dir"),
        ("data", "mask"),
        lambda c: c.data.mask_dir is not None and c.data.mask != "files",
        ("`{first}` pede `{second}: arquivos`", "`{first}` needs `{second}: files`"),
        ("mude a máscara, ou apague a pasta", "change the mask, or delete the folder"),
    ),
    Conflict(
        ("model", "adapter_kind"),
        ("model", "dora"),
        lambda c: c.model.adapter_kind != "lora" and c.model.dora,
        (
            "`{first}: {c.model.adapter_kind}` não anda com `{second}`, que é do LoRA",
            "`{first}: {c.model.adapter_kind}` excludes `{second}`, which belongs to LoRA",
        ),
        ("apague `{second}`", "delete `{second}`"),
    ),
    Conflict(
        ("model", "adapter_kind"),
        ("training", "lora_plus_ratio"),
        lambda c: c.model.adapter_kind != "lora" and c.training.lora_plus_ratio != 1,
        (
            "`{second}` vale para a matriz B do LoRA, que `{first}: {c.model.adapter_kind}` não tem",
            "`{second}` is about LoRA's matrix B, which `{first}: {c.model.adapter_kind}` has not",
        ),
        ("apague `{second}`", "delete `{second}`"),
    ),
    Conflict(
        ("model", "lora_init"),
        ("model", "adapter_kind"),
        lambda c: c.model.lora_init == "pissa" and c.model.adapter_kind != "lora",
        (
            "`{first}: pissa` é do LoRA; `{second}: {c.model.adapter_kind}` começa de outro jeito",
            "`{first}: pissa` belongs to LoRA; `{second}: {c.model.adapter_kind}` starts in another way",
        ),
        ("apague `{first}`", "delete `{first}`"),
    ),
    Conflict(
        ("model", "lora_init"),
        ("model", "dora"),
        lambda c: c.model.lora_init == "pissa" and c.model.dora,
        (
            "`{first}: pissa` não anda com `{second}`, que mede a norma do peso inteiro",
            "`{first}: pissa` excludes `{second}`, which measures the norm of the whole weight",
        ),
        ("apague um dos dois", "delete one of the two"),
    ),
    Conflict(
        ("model", "lora_init"),
        ("model", "lora_dropout"),
        lambda c: c.model.lora_init == "pissa" and c.model.lora_dropout > 0,
        (
            "`{first}: pissa` não anda com `{second}`: o que se apaga seria parte do próprio modelo base",
            "`{first}: pissa` excludes `{second}`: what is dropped would be a part of the base itself",
        ),
        ("apague `{second}`", "delete `{second}`"),
    ),
    Conflict(
        ("model", "lora_init"),
        ("model", "initial_lora"),
        lambda c: c.model.lora_init == "pissa" and c.model.initial_lora is not None,
        (
            "`{first}: pissa` e `{second}` são dois começos para o mesmo LoRA",
            "`{first}: pissa` and `{second}` are two starts of the same LoRA",
        ),
        (
            "para continuar um LoRA feito com pissa, apague `{first}` e dobre o rank",
            "to continue a LoRA made with pissa, delete `{first}` and double the rank",
        ),
    ),
    Conflict(
        ("model", "lora_rules"),
        ("training", "optimizer"),
        lambda c: c.training.optimizer == "prodigy" and any("rate" in rule for rule in c.model.lora_rules),
        (
            "`{first}` dá taxas próprias, e o prodigy usa uma só, que ele mesmo acha",
            "`{first}` gives rates of their own, and prodigy uses a single one, which it finds itself",
        ),
        ("apague as taxas das regras, ou use outro otimizador", "delete the rules' rates, or use another optimizer"),
    ),
    Conflict(
        ("training", "zero_terminal_snr"),
        ("model", "prediction_type"),
        lambda c: c.training.zero_terminal_snr and c.model.prediction_type == "epsilon",
        (
            "`{first}` só funciona com predição v: com SNR zero, epsilon nada diz da imagem",
            "`{first}` works only with v prediction: at zero SNR epsilon says nothing of the image",
        ),
        (
            "apague `{first}` se o modelo base prevê epsilon",
            "delete `{first}` if the base model predicts epsilon",
        ),
    ),
)


def contradictions(facts: Facts) -> list[Problem]:
    problems = []
    for conflict in (*_CONFLICTS, *conflicts()):
        if conflict.holds(facts.config) and not facts.failed & {conflict.first, conflict.second}:
            one, other = facts.where(conflict.first), facts.where(conflict.second)
            message, hint = conflict.told(facts.name(conflict.first), facts.name(conflict.second), facts.config)
            problems.append(Problem(message, one or other, hint, other if one else None))
    singles: dict[Key, Callable[[Facts, Key], Problem | None]] = {
        ("training", "lr_warmup"): _warmup,
        ("model", "family"): _family,
        ("model", "lora_targets"): _targets,
        ("model", "lora_rules"): _layer_rules,
        ("data", "background"): _background,
        ("training", "betas"): _betas,
    }
    found = [check(facts, key) for key, check in singles.items() if key in facts.entries and key not in facts.failed]
    return [*problems, *(problem for problem in found if problem)]


def _warmup(facts: Facts, key: Key) -> Problem | None:
    warmup = facts.config.training.lr_warmup
    if warmup <= 1 or warmup.is_integer():
        return None
    message = t(
        pt=f"`{facts.name(key)}`: {warmup:g} não é fração (menos de 1) nem número inteiro de passos",
        en=f"`{facts.name(key)}`: {warmup:g} is neither a share (below 1) nor a whole number of steps",
    )
    return Problem(message, facts.where(key), t(pt="por exemplo 0.1, ou 100", en="for example 0.1, or 100"))


def _family(facts: Facts, key: Key) -> Problem | None:
    family, available = facts.config.model.family, ["auto", *plugins.available("lora_trainer.families")]
    if family in available:
        return None
    near = names.nearest(family, available, 0.5)
    if near:
        hint = t(pt=f"você quis dizer `{near}`?", en=f"did you mean `{near}`?")
    else:
        hint = t(pt="famílias: ", en="families: ") + ", ".join(available)
    message = t(pt=f"não conheço a família `{family}`", en=f"unknown family `{family}`")
    return Problem(message, facts.where(key), hint)


def _targets(facts: Facts, key: Key) -> Problem | None:
    try:
        re.compile(facts.config.model.lora_targets)
    except re.error as error:
        message = t(
            pt=f"`{facts.name(key)}`: expressão regular inválida ({error})",
            en=f"`{facts.name(key)}`: invalid regular expression ({error})",
        )
        option = names.options()[key]
        return Problem(message, facts.where(key), t(pt=option.doc_pt, en=option.doc_en))
    return None


def _layer_rules(facts: Facts, key: Key) -> Problem | None:
    for rule in facts.config.model.lora_rules:
        try:
            re.compile(rule["target"])
        except re.error as error:
            message = t(
                pt=f"`{facts.name(key)}`: expressão regular inválida em `{rule['target']}` ({error})",
                en=f"`{facts.name(key)}`: invalid regular expression in `{rule['target']}` ({error})",
            )
            return Problem(message, facts.where(key))
    return None


def _betas(facts: Facts, key: Key) -> Problem | None:
    wrong = [beta for beta in facts.config.training.betas or () if not 0 <= beta < 1]
    if not wrong:
        return None
    message = t(
        pt=f"`{facts.name(key)}`: esperava valores de 0 até menos de 1, veio {wrong[0]:g}",
        en=f"`{facts.name(key)}`: expected values from 0 to below 1, got {wrong[0]:g}",
    )
    return Problem(message, facts.where(key), t(pt="o usual é [0.9, 0.999]", en="[0.9, 0.999] is usual"))


def _background(facts: Facts, key: Key) -> Problem | None:
    from PIL import ImageColor

    colour = facts.config.data.background
    try:
        ImageColor.getrgb(colour)
    except ValueError:
        message = t(
            pt=f"`{facts.name(key)}`: não conheço a cor `{colour}`",
            en=f"`{facts.name(key)}`: unknown colour `{colour}`",
        )
        return Problem(
            message, facts.where(key), t(pt="use white, black ou '#rrggbb'", en="use white, black or '#rrggbb'")
        )
    return None


def inside_run_folder(facts: Facts, name: str) -> list[Problem]:
    """Inputs that lie in this run's own folder, which a later start moves aside with all that is in it."""
    run = Path(os.path.realpath(os.path.join(facts.config.output.dir, name)))
    problems = []
    for key, option in names.options().items():
        value = getattr(getattr(facts.config, key[0]), key[1])
        if option.kind not in names.PATH_KINDS or key in (*OUTPUTS, *facts.failed) or not value or not name.strip():
            continue
        path = Path(os.path.realpath(value))
        if os.path.isabs(value) and (path == run or run in path.parents):
            message = t(
                pt=f"`{facts.name(key)}` fica na pasta desta execução ({run}), que um novo início põe de lado inteira",
                en=f"`{facts.name(key)}` lies in this run's own folder ({run}), which a new start moves aside whole",
            )
            hint = t(
                pt=f"mude o arquivo ou a pasta de lugar, ou troque `{facts.name(('output', 'name'))}`",
                en=f"move the file or folder elsewhere, or change `{facts.name(('output', 'name'))}`",
            )
            problems.append(Problem(message, facts.where(key), hint, facts.where(("output", "name"))))
    return problems


def name_problem(name: str, where: Where | None) -> Problem | None:
    """The output's name becomes a file name on every system the file may travel to."""
    bad = sorted({c for c in name if c in '<>:"/\\|?*' or ord(c) < 32 or printable(c) != c})
    hint = t(
        pt="use letras, números, espaço, `-`, `_` e `.` em `saida.nome`",
        en="use letters, numbers, space, `-`, `_` and `.` in `output.name`",
    )
    if bad:
        shown, name = " ".join(repr(c)[1:-1] if printable(c) == c else printable(c) for c in bad), printable(name)
        message = t(
            pt=f"o nome `{name}` não serve para um arquivo: tem {shown}",
            en=f"the name `{name}` cannot name a file: it has {shown}",
        )
    elif not name.strip() or name != name.strip() or name.endswith(".") or name.startswith("."):
        message = t(
            pt=f"o nome `{name}` não serve para um arquivo: vazio, ou com ponto ou espaço na ponta",
            en=f"the name `{name}` cannot name a file: empty, or with a dot or space at an end",
        )
    elif name.split(".")[0].lower() in _RESERVED:
        message = t(pt=f"o nome `{name}` é reservado no Windows", en=f"the name `{name}` is reserved on Windows")
    elif len(name.encode()) > MAX_NAME_BYTES:
        message = t(
            pt=f"o nome `{name[:20]}…` é longo demais: até {MAX_NAME_BYTES} bytes",
            en=f"the name `{name[:20]}…` is too long: up to {MAX_NAME_BYTES} bytes",
        )
    else:
        return None
    return Problem(message, where, hint)
