"""What is worth a line but not a stop: options that change nothing, and sizes that had to be rounded."""

from collections.abc import Callable
from dataclasses import dataclass

from ..choices.losses import LOSSES
from ..choices.schedules import SCHEDULES
from ..errors import t
from . import names
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
    _Needs(
        ("training", "text_encoder_learning_rate"),
        lambda c: c.model.train_text_encoder,
        ("model", "train_text_encoder"),
    ),
    *(_of_curve(option, row.name) for row in SCHEDULES.values() for option in row.reads),
    _Needs(("training", "huber_delta"), lambda c: bool(LOSSES[c.training.loss].bound), ("training", "loss"), "huber"),
    _Needs(("training", "validate_every"), lambda c: c.data.validation_fraction > 0, ("data", "validation_fraction")),
    _Needs(("data", "crop_variants"), lambda c: c.data.crop == "random", ("data", "crop"), "random"),
    _Needs(("data", "unmasked_weight"), lambda c: c.data.mask != "no", ("data", "mask"), "alpha"),
    _Needs(("data", "prior_weight"), lambda c: c.data.regularization_dir is not None, ("data", "regularization_dir")),
    _Needs(
        ("data", "keep_tags"),
        lambda c: c.data.shuffle_captions or c.data.tag_dropout > 0,
        ("data", "shuffle_captions"),
    ),
    _Needs(("samples", "every"), lambda c: bool(c.samples.prompts), ("samples", "prompts")),
    _Needs(("output", "keep_last"), lambda c: c.output.save_every > 0, ("output", "save_every")),
)


def without_effect(facts: Facts) -> list[str]:
    """A notice for each option the user set that will not be looked at, here or by the programs that read the file."""
    notices = []
    for needs in _NEEDS:
        if needs.key not in facts.entries or needs.holds(facts.config):
            continue
        option = names.options()[needs.key]
        if getattr(getattr(facts.config, option.section), option.name) == option.default:
            continue
        entry = facts.entries[needs.key]
        other = facts.value(needs.other, needs.word) if needs.word else facts.name(needs.other)
        effect = t(
            pt=f"`{entry.written}` não tem efeito sem `{other}`",
            en=f"`{entry.written}` has no effect without `{other}`",
        )
        notices.append(f"{entry.where.origin()}: {effect}")
    return notices


def rounded(facts: Facts) -> tuple[Config, dict[Key, str], list[str]]:
    """(config with sides that fit, key -> remark for its origin, notices): nothing is rounded without being said."""
    config, remarks, notices = facts.config, {}, []

    def replace(key: Key, old: str, new: object, new_text: str, multiple: int) -> None:
        nonlocal config
        section = getattr(config, key[0])
        config = config.model_copy(update={key[0]: section.model_copy(update={key[1]: new})})
        remarks[key] = t(pt=f"arredondado de {old}", en=f"rounded from {old}")
        where = facts.where(key)
        notices.append(
            (f"{where.origin()}: " if where else "")
            + t(
                pt=f"`{facts.name(key)}`: {old} arredondado para {new_text} (múltiplos de {multiple})",
                en=f"`{facts.name(key)}`: {old} rounded to {new_text} (multiples of {multiple})",
            )
        )

    for key, sides, multiple in (
        (("data", "resolution"), config.data.resolution, SIDE_MULTIPLE),
        (("samples", "resolution"), config.samples.resolution, SAMPLE_MULTIPLE),
    ):
        fitting = tuple(nearest_multiple(side, multiple) for side in sides or ())
        if sides and fitting != sides:
            replace(key, "x".join(map(str, sides)), fitting, "x".join(map(str, fitting)), multiple)
    step = config.data.bucket_step
    if step % SIDE_MULTIPLE:
        up = -(-step // SIDE_MULTIPLE) * SIDE_MULTIPLE
        replace(("data", "bucket_step"), str(step), up, str(up), SIDE_MULTIPLE)
    return config, remarks, notices


def nearest_multiple(side: int, multiple: int) -> int:
    """The nearest multiple, the smaller of two equally near, and at least one."""
    return max(multiple, -(-(side - multiple // 2) // multiple) * multiple)
