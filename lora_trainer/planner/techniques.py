"""From a config to the techniques it asks for. Where an option is still `auto`, the plan has not spoken: the usual holds."""

from pathlib import Path

import torch

from ..config import names
from ..config.declared import techniques, with_values
from ..config.schema import Config
from ..errors import ConfigError, t
from ..machine.hardware import Precision
from ..seam.technique import Asked, Technique
from ..techniques import MemoryPlan


def make_plan(config: Config, precision: Precision, device: torch.device, folder: Path) -> MemoryPlan:
    """`folder`: where a mapped host master would lie. Raises ConfigError for options that cannot go together."""
    settled = with_values(config, {("training", "mixed_precision"): precision.name})  # of `auto` only the machine knows
    asked = Asked(settled, precision.name, device.type, str(folder))
    found = [technique.of(asked) for technique in techniques()]
    chosen: list[Technique] = [technique for technique in found if technique is not None]
    for technique in chosen:
        _refuse(technique, settled)
    return MemoryPlan(tuple(chosen))


def _refuse(technique: Technique, config: Config) -> None:
    """What it excludes, as far as the user's config did not tell."""
    for conflict in technique.excludes:
        if conflict.holds(config):
            told = {"first": names.shown(*conflict.first), "second": names.shown(*conflict.second), "c": config}
            problem = t(pt=conflict.problem[0], en=conflict.problem[1]).format(**told)
            raise ConfigError(problem, t(pt=conflict.hint[0], en=conflict.hint[1]).format(**told))
