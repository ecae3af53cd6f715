"""What is worth a line but not a stop: options that change nothing, and sizes that had to be rounded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..choices.losses import LOSSES
from ..choices.schedules import SCHEDULES
from ..errors import t
from . import names
from .fields import value_of, with_values
from .names import Key
from .rules import Facts
from .schema import Config

SIDE_MULTIPLE = 64
"""Image sides of SD 1.x/2.x/SDXL: 8 (VAE) x 2^3 (UNet levels)."""
SAMPLE_MULTIPLE = 32
"""Preview sides: what every family can draw. Tokens of transformers are 16 or 32 pixels wide; UNets would take 8."""


@dataclass(frozen=True)
class _Needs:
    """An option that changes nothing unless something else holds."""

    key: Key
    holds: Callable[[Config], bool]
    other: Key
    word: str | None = None
    """The value the other option would need, where it is a word."""


def _has_convolutions(config: Config) -> bool:
    return config.model.lora_targets not in ("auto", "attention", "attention+mlp")


def _of_curve(option: str, curve: str) -> _Needs:
    """An option of `training` that only some curves read, such as `curve`."""
    return _Needs(
        ("training", option),
        lambda c: option in SCHEDULES[c.training.lr_scheduler].reads,
        ("training", "lr_scheduler"),
        curve,
    )


_NEEDS = (
    _Needs(("model", "conv_rank"), _has_convolutions, ("model", "lora_targets"), "all"),
    _Needs(("model", "conv_alpha"), _has_convolutions, ("model", "lora_targets"), "all"),
    _Needs(("model", "lokr_factor"), lambda c: c.model.adapter_kind == "lokr", ("model", "adapter_kind"), "lokr"),
    _Needs(("training", "text_encoder_learning_rate"), lambda c: c.model.train_text_encoder, ("model", "train_text_encoder")),
    *(_of_curve(option, row.name) for row in SCHEDULES.values() for option in row.reads),
    _Needs(("training", "huber_delta"), lambda c: bool(LOSSES[c.training.loss].bound), ("training", "loss"), "huber"),
    _Needs(("training", "validate_every"), lambda c: c.data.validation_fraction > 0, ("data", "validation_fraction")),
    _Needs(("data", "crop_variants"), lambda c: c.data.crop == "random", ("data", "crop"), "random"),
    _Needs(("data", "unmasked_weight"), lambda c: c.data.mask != "no", ("data", "mask"), "alpha"),
    _Needs(("data", "prior_weight"), lambda c: c.data.regularization_dir is not None, ("data", "regularization_dir")),
    _Needs(("data", "keep_tags"), lambda c: c.data.shuffle_captions or c.data.tag_dropout > 0, ("data", "shuffle_captions")),
    _Needs(("samples", "every"), lambda c: bool(c.samples.prompts), ("samples", "prompts")),
    _Needs(("output", "keep_last"), lambda c: c.output.save_every > 0, ("output", "save_every")),
)


def without_effect(facts: Facts) -> Iterator[str]:
    """A notice for each option the user set that will not be looked at, here or by the programs that read the file."""
    for needs in _NEEDS:
        entry, default = facts.entries.get(needs.key), names.options()[needs.key].default
        if entry is None or needs.holds(facts.config) or value_of(facts.config, needs.key) == default:
            continue
        other = facts.value(needs.other, needs.word) if needs.word else facts.name(needs.other)
        effect = t(
            pt=f"`{entry.written}` não tem efeito sem `{other}`",
            en=f"`{entry.written}` has no effect without `{other}`",
        )
        yield f"{entry.where.origin()}: {effect}"


def rounded(facts: Facts) -> tuple[Config, dict[Key, str], list[str]]:
    """(config with sides that fit, key -> remark for its origin, notices): nothing is rounded without being said."""
    remarks, notices = {}, []
    fitting = dict(_fitting(facts.config))
    for key, (new, multiple) in fitting.items():
        old_text, new_text = _sides(value_of(facts.config, key)), _sides(new)
        remarks[key] = t(pt=f"arredondado de {old_text}", en=f"rounded from {old_text}")
        where = facts.where(key)
        notices.append(
            (f"{where.origin()}: " if where else "")
            + t(
                pt=f"`{facts.name(key)}`: {old_text} arredondado para {new_text} (múltiplos de {multiple})",
                en=f"`{facts.name(key)}`: {old_text} rounded to {new_text} (multiples of {multiple})",
            )
        )
    return with_values(facts.config, {key: new for key, (new, _) in fitting.items()}), remarks, notices


def _fitting(config: Config) -> Iterator[tuple[Key, tuple[Any, int]]]:
    """(option, (value that fits, multiple of what)) of those that do not."""
    for section, multiple in (("data", SIDE_MULTIPLE), ("samples", SAMPLE_MULTIPLE)):
        sides = value_of(config, (section, "resolution"))
        fitting = tuple(nearest_multiple(side, multiple) for side in sides or ())
        if sides and fitting != sides:
            yield (section, "resolution"), (fitting, multiple)
    if step := config.data.bucket_step % SIDE_MULTIPLE:
        yield ("data", "bucket_step"), (config.data.bucket_step - step + SIDE_MULTIPLE, SIDE_MULTIPLE)


def _sides(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def nearest_multiple(side: int, multiple: int) -> int:
    """The nearest multiple, the smaller of two equally near, and at least one."""
    return max(multiple, -(-(side - multiple // 2) // multiple) * multiple)
