"""Which layers get an adapter, how strong each is, and what is refused before anything is loaded."""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import ConfigError, t
from ..layouts.lycoris import TITLES
from ..layouts.readers import programs, unreadable
from ..layouts.table import LAYOUTS
from ..seam.family import Family


@dataclass(frozen=True)
class Strength:
    """Of one layer's adapter. `rate`: its learning rate, where a rule gives one."""

    rank: int
    alpha: float
    rate: float | None = None

    def scale(self, settings: ModelConfig) -> float:
        """What multiplies the product of its matrices."""
        return self.alpha / (math.sqrt(self.rank) if settings.rslora else self.rank)

    def resized(self, rank: int, settings: ModelConfig) -> "Strength":
        """Another rank of the same scale."""
        ratio = rank / self.rank
        return Strength(rank, self.alpha * (math.sqrt(ratio) if settings.rslora else ratio), self.rate)


def strengths(model: nn.ModuleDict, paths: Sequence[str], settings: ModelConfig) -> dict[str, Strength]:
    """By module path. Of the rules that match a layer, the first that says something of rank, alpha or rate counts for it."""
    modules = dict(model.named_modules())
    rules = [(re.compile(rule["target"]), rule) for rule in settings.lora_rules]
    return {
        path: _strength(modules[path], [rule for pattern, rule in rules if pattern.search(path)], settings)
        for path in paths
    }


def _strength(layer: nn.Module, rules: Sequence[Mapping[str, Any]], settings: ModelConfig) -> Strength:
    rank, alpha = settings.lora_rank, settings.lora_alpha
    found = Strength(rank, float(rank if alpha is None else alpha))
    if is_wide_conv(layer):
        found = found.resized(settings.conv_rank or rank, settings)
        found = Strength(found.rank, found.alpha if settings.conv_alpha is None else settings.conv_alpha)
    rank_, alpha_, rate = (next((r[key] for r in rules if key in r), None) for key in ("rank", "alpha", "rate"))
    found = found if rank_ is None else found.resized(rank_, settings)
    return Strength(found.rank, found.alpha if alpha_ is None else float(alpha_), rate)


def is_wide_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and tuple(module.kernel_size) != (1, 1)


def find_targets(
    model: nn.ModuleDict, family: Family, settings: ModelConfig, formats: Collection[str] = ("kohya",)
) -> list[str]:
    """Paths of the linear and convolution layers to adapt, in the model's order."""
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    text = [name for name in layers if name.startswith("text_encoder")]
    rest = [name for name in layers if not name.startswith("text_encoder")]
    if settings.lora_targets in family.lora_targets:
        pattern = re.compile(family.lora_targets[settings.lora_targets])
        chosen = [name for name in rest if pattern.fullmatch(name)]
    else:
        pattern = _user_pattern(settings.lora_targets, family)
        chosen = [name for name in rest if pattern.search(name)]
    if not chosen:
        raise _no_match(settings.lora_targets, rest, family)
    if settings.train_text_encoder:
        pattern = re.compile(family.text_targets)
        adapted = [name for name in text if pattern.fullmatch(name)]
        assert adapted, "train_text_encoder needs the text encoders in the model"
        chosen += adapted
    _check_rules(chosen, settings)
    _check_formats(family, settings, formats)
    if settings.adapter_kind == "lora":
        _check_readers(model, chosen, family, settings, formats)
    return chosen


def _check_rules(chosen: Sequence[str], settings: ModelConfig) -> None:
    for rule in settings.lora_rules:
        if not any(re.search(rule["target"], name) for name in chosen):
            raise _rule_without_layers(rule["target"], chosen)


def _check_formats(family: Family, settings: ModelConfig, formats: Collection[str]) -> None:
    """What LoHa and LoKr are written in, and the one layout that has no place for DoRA."""
    kind = settings.adapter_kind
    if kind != "lora":
        _check_kind(family, kind, formats)
    if settings.dora and "kohya" in formats and family.kohya_slots is not None:
        raise ConfigError.said(
            pt=f"um arquivo kohya de {family.title} não guarda DoRA: q, k e v são uma só matriz",
            en=f"a kohya file of {family.title} cannot hold DoRA: q, k and v are one matrix",
            hint_pt="use saida.formatos: [diffusers], ou apague dora",
            hint_en="use output.formats: [diffusers], or delete dora",
            where=shown("model", "dora"),
        )


def _check_kind(family: Family, kind: str, formats: Collection[str]) -> None:
    title = TITLES[kind]
    if not all(name in LAYOUTS and kind in LAYOUTS[name].kinds for name in formats):
        raise ConfigError.said(
            pt=f"{title} é só para modelos de imagem, não para {family.title}",
            en=f"{title} is for image models only, not for {family.title}",
            hint_pt="use tipo_adaptador: lora",
            hint_en="use adapter_kind: lora",
            where=shown("model", "adapter_kind"),
        )
    if not all(programs(family, layout, kind) for layout in formats):
        *others, last = programs(family, "kohya", kind)
        raise ConfigError.said(
            pt=f"o diffusers não lê {title} de {family.title}",
            en=f"diffusers does not read a {title} of {family.title}",
            hint_pt=f"use saida.formatos: [kohya], que o {', o '.join(others)} e o {last} leem",
            hint_en=f"use output.formats: [kohya], which {', '.join(others)} and {last} read",
            where=shown("output", "formats"),
        )


def _check_readers(
    model: nn.ModuleDict, chosen: list[str], family: Family, settings: ModelConfig, formats: Collection[str]
) -> None:
    config = getattr(model["unet"], "config", None) if "unet" in model else None
    if lost := unreadable(chosen, family, formats, config):
        raise _not_carried(settings.lora_targets, lost)
    slots = family.kohya_slots
    if slots is None or "kohya" not in formats or not settings.lora_rules:
        return
    ranks: dict[str, dict[int, list[str]]] = {}
    for path, strength in strengths(model, chosen, settings).items():
        slot = slots(path)
        if slot is not None and slot.rows:
            ranks.setdefault(slot.name, {}).setdefault(strength.rank, []).append(path)
    for name, by_rank in ranks.items():
        if len(by_rank) > 1:
            raise _torn(name, [paths[0] for paths in by_rank.values()])


def _torn(name: str, paths: Sequence[str]) -> ConfigError:
    return ConfigError.said(
        pt=f"{' e '.join(paths)} são uma só matriz num arquivo kohya ({name}), mas têm ranks diferentes",
        en=f"{' and '.join(paths)} are one matrix in a kohya file ({name}), but differ in rank",
        hint_pt="dê às partes o mesmo rank, ou use saida.formatos: [diffusers]",
        hint_en="give the parts one rank, or use output.formats: [diffusers]",
        where=shown("model", "lora_rules"),
    )


def _not_carried(text: str, lost: list[str]) -> ConfigError:
    listed = "".join(f"\n    {path}" for path in lost[:8]) + ("\n    …" if len(lost) > 8 else "")
    return ConfigError.said(
        pt=f"`{text}` pega {len(lost)} camadas que o diffusers não acha num arquivo kohya:{listed}",
        en=f"`{text}` matches {len(lost)} layers that diffusers does not find in a kohya file:{listed}",
        hint_pt="restrinja a expressão (por exemplo, `_block`), ou use saida.formatos: [diffusers]",
        hint_en="narrow the expression (for example, `_block`), or set output.formats: [diffusers]",
        where=shown("model", "lora_targets"),
    )


def _user_pattern(text: str, family: Family) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        presets = ", ".join(family.lora_targets)
        raise ConfigError.said(
            pt=f"`{text}` não é um dos conjuntos de camadas nem uma expressão regular válida ({error})",
            en=f"`{text}` is neither a set of layers nor a valid regular expression ({error})",
            hint_pt=f"use um destes: {presets}; ou uma expressão como `attn2.*to_[qkv]$`",
            hint_en=f"use one of: {presets}; or an expression such as `attn2.*to_[qkv]$`",
            where=shown("model", "lora_targets"),
        ) from error


def _no_match(text: str, names: list[str], family: Family) -> ConfigError:
    presets = ", ".join(family.lora_targets)
    return ConfigError(
        t(pt=f"nenhuma camada do modelo combina com `{text}`", en=f"no layer of the model matches `{text}`"),
        t(pt=f"conjuntos prontos: {presets}. ", en=f"ready sets: {presets}. ") + _near(text, names),
        shown("model", "lora_targets"),
    )


def _rule_without_layers(text: str, names: Sequence[str]) -> ConfigError:
    mend = t(pt="corrija a expressão, ou aumente alvos_lora. ", en="correct the expression, or widen lora_targets. ")
    return ConfigError(
        t(
            pt=f"nenhuma das camadas de alvos_lora combina com a regra `{text}`",
            en=f"none of the layers of lora_targets matches the rule `{text}`",
        ),
        mend + _near(text, names),
        shown("model", "lora_rules"),
    )


def _near(text: str, names: Sequence[str]) -> str:
    kinds = sorted({re.sub(r"\d+", "N", name) for name in names})
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", text).strip(".")
    near = sorted(kinds, key=lambda kind: -difflib.SequenceMatcher(None, plain, kind[-len(plain) :]).ratio())[:5]
    listed = "".join(f"\n    {kind}" for kind in near)
    return t(pt=f"Camadas parecidas (N = número):{listed}", en=f"Similar layers (N = a number):{listed}")
