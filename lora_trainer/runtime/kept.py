"""The plan of a run in its folder: `plano.json`, written before the first step and after every change, read on resume.

Option names in English, memory in GiB. A tightened plan is kept, so that a resumed run does not meet the same shortage.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import write_json
from ..config.names import Key
from ..planner.foresee import Foresight, keys, named, named_gib
from ..planner.ladder import LOSSY, Rung
from ..units import GIB, in_gib

FORESEEN = ("fits", "peak_gib", "phases", "saves")


@dataclass(frozen=True)
class Kept:
    rung: Rung
    peak: int | None
    """Bytes of live tensors that were foreseen; None where nothing was."""
    encoding: dict[str, Any]
    foreseen: dict[str, Any]
    """Phases, peak and savings, as they stand in the file."""


def write_plan(path: Path, rung: Rung, found: Foresight | None, facts: Mapping[str, Any]) -> None:
    """`facts`: what else is to be kept (techniques, device, precision, encoding, measured peaks)."""
    foreseen: dict[str, Any] = {}
    if found is not None:
        foreseen = {
            "fits": found.fits,
            "peak_gib": in_gib(found.peak),
            "phases": found.phases_in_gib(),
            "saves": named_gib(found.saves),
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
    """What a resumed run keeps even if it must be planned anew, since numbers depend on it: the base, the optimizer's state."""
    return frozenset(step.key for step in LOSSY)
