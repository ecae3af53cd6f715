"""From a config to the techniques it asks for. Where an option is still `auto`, the plan has not spoken: the usual holds."""

from collections.abc import Sequence
from pathlib import Path

import torch

from ..config import names
from ..config.declared import Conflict, techniques, with_values
from ..config.schema import Config
from ..errors import ConfigError
from ..machine.hardware import Precision
from ..seam.technique import Asked, Technique
from ..techniques import MemoryPlan


def make_plan(config: Config, precision: Precision, device: torch.device, folder: Path) -> MemoryPlan:
    """`folder`: where a mapped host master would lie. Raises ConfigError for options that cannot go together."""
    settled = with_values(config, {("training", "mixed_precision"): precision.name})  # of `auto` only the machine knows
    asked = Asked(settled, precision.name, device.type, str(folder))
    found = [technique.of(asked) for technique in techniques()]
    chosen: list[Technique] = [technique for technique in found if technique is not None]
    _refuse_conflicts([conflict for one in chosen for conflict in one.excludes if conflict.holds(settled)], settled)
    return MemoryPlan(tuple(chosen))


def _refuse_conflicts(found: Sequence[Conflict], config: Config) -> None:
    """Those that the config alone did not show when it was read."""
    if found:
        lines = [conflict.told(names.shown(*conflict.first), names.shown(*conflict.second), config) for conflict in found]
        raise ConfigError("; ".join(problem for problem, _ in lines), "; ".join(hint for _, hint in lines))
