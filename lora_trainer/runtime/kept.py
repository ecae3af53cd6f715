"""The plan of a run in its folder: `plano.json`, written before the first step and after every change, read on resume.

Option names in English, memory in GiB. A tightened plan is kept, so that a resumed run does not meet the same shortage.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.names import Key
from ..config.schema import Config
from ..journal.progress import write_json
from ..planner.foresee import Foresight, keys, named
from ..planner.ladder import Rung
from ..planner.options import (
    CHECKPOINTING,
    EMBEDDINGS,
    OPTIMIZER_8BIT,
    OPTIMIZER_OFFLOAD,
    QUANTIZATION,
    SOLVED,
    moments_can_leave,
)
from ..units import GIB

FORESEEN = ("fits", "peak_gib", "phases", "saves")


@dataclass(frozen=True)
class Kept:
    rung: Rung
    peak: int | None
    """Bytes of live tensors that were foreseen; None where nothing was."""
    encoding: dict[str, Any]
    foreseen: dict[str, Any]
    """Phases, peak and savings, as they stand in the file."""


def plain_values(config: Config) -> dict[Key, Any]:
    """The solved options as they hold where no plan has spoken: recomputation, and nothing else unless asked for.

    Whether the base has embeddings to put away is not known here, so that option is left out, unless the user set it.
    """
    values = {key: getattr(getattr(config, key[0]), key[1]) for key in SOLVED}
    if values[EMBEDDINGS] == "auto":
        del values[EMBEDDINGS]
    if not moments_can_leave(config):
        del values[OPTIMIZER_OFFLOAD]
    values = {key: "no" if value == "auto" else value for key, value in values.items()}
    return {**values, CHECKPOINTING: "no" if config.training.gradient_checkpointing == "no" else "yes"}


def write_plan(path: Path, rung: Rung, found: Foresight | None, facts: Mapping[str, Any]) -> None:
    """`facts`: what else is to be kept (techniques, device, precision, encoding, measured peaks)."""
    foreseen: dict[str, Any] = {}
    if found is not None:
        phases = {
            name: {"total": peak.total, "host": peak.host, **peak.causes} for name, peak in found.phases.items()
        }
        foreseen = {
            "fits": found.fits,
            "peak_gib": _gib(found.peak),
            "phases": {name: {cause: _gib(n) for cause, n in causes.items()} for name, causes in phases.items()},
            "saves": {name: _gib(saved) for name, saved in named(found.saves).items()},
        }
    write_json(path, {"plan": named(rung.values), "micro_batch": rung.micro_batch, **foreseen, **facts})


def read_plan(path: Path) -> Kept | None:
    """None where there is none, or only a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = keys(content["plan"])
        peak = content.get("peak_gib")
        return Kept(
            Rung(values, int(content["micro_batch"])),
            None if peak is None else int(float(peak) * GIB),
            dict(content.get("encoding") or {}),
            {name: content[name] for name in FORESEEN if name in content},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def fixed_on_resume() -> frozenset[Key]:
    """What a resumed run keeps even if it must be planned anew: its optimizer's state, and the base it was trained on."""
    return frozenset((OPTIMIZER_8BIT, QUANTIZATION))


def _gib(count: int) -> float:
    return round(count / GIB, 4)
