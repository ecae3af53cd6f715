"""A whole run foreseen: the solved options, every phase's peak, the time of a step; kept on disk.

The cache cannot go stale: its key holds the source code of this package, the versions of the libraries that run in a
simulation, the architecture, and all options that the run's memory depends on.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..config.names import Key
from ..config.schema import Config
from ..families._base import Family
from ..hardware import Precision
from ..progress import write_json
from ..tracker import PhasePeak
from .plan import Candidate, Planner, with_values
from .simulate import Shape, simulate_between, simulate_caching, simulation_device
from .speed import Speed
from .techniques import make_plan

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes")
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Tried:
    """One candidate that was simulated: options, bytes of its training peak, and what a step costs."""

    values: dict[Key, Any]
    peak: int
    flops: int
    transferred: int


@dataclass(frozen=True)
class Foresight:
    """Bytes. `values` are the options solved; `phases` are in the order of the run."""

    values: dict[Key, Any]
    phases: dict[str, PhasePeak]
    fits: bool
    lossless: bool
    flops: int
    transferred: int
    tried: tuple[Tried, ...]

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases.values())

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def host(self) -> int:
        return max(phase.host for phase in self.phases.values())

    def seconds(self, speed: Speed) -> float:
        """Of one optimizer step."""
        return speed.seconds(self.flops, self.transferred)


def foresee(
    family: Family, config: Config, precision: Precision, shape: Shape, available: int | None, folder: Path | None = None
) -> Foresight:
    """Solve the `auto` options and simulate every phase. `folder`: where answers are kept; None keeps none."""
    path = folder / f"{_key(family, config, precision, shape, available)}.json" if folder else None
    if path and (known := _read(path)) is not None:
        return known
    planner = Planner(family, config, precision, shape, available)
    best = planner.solve()
    solved = with_values(config, best.values)
    plan = make_plan(solved, precision, simulation_device(), Path())
    phases = dict(simulate_caching(family, precision.frozen, shape.resolution).phases)
    phases |= best.prediction.phases
    phases |= simulate_between(family, solved, precision.frozen, plan, shape).phases
    fits = available is None or max(phase.total for phase in phases.values()) <= available
    tried = tuple(_tried(candidate) for candidate in planner.tried)
    cost = best.prediction
    found = Foresight(best.values, phases, fits, best.lossless, cost.flops, cost.transferred, tried)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _to_json(found))
    return found


def _tried(candidate: Candidate) -> Tried:
    cost = candidate.prediction
    return Tried(candidate.values, candidate.training_peak, cost.flops, cost.transferred)


# -- the cache


def _key(family: Family, config: Config, precision: Precision, shape: Shape, available: int | None) -> str:
    options = config.model_dump(mode="json", include={"model", "training", "memory", "data"})
    for private in ("base_model", "vae", "tokenizer", "architecture", "initial_lora"):
        options["model"].pop(private)
    facts = [family.name, family.architecture(), options, str(precision.frozen), precision.name, asdict(shape), available]
    return hashlib.sha256(json.dumps([_code(), facts], sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """The package's source and the libraries' versions."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    for name in LIBRARIES:
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            digest.update(f"{name} -".encode())
    digest.update(str(simulation_device()).encode())
    return digest.hexdigest()


def _read(path: Path) -> Foresight | None:
    """None for a missing or damaged answer."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        phases = {name: PhasePeak(**peak) for name, peak in raw.pop("phases").items()}
        tried = tuple(Tried(**{**one, "values": _keys(one["values"])}) for one in raw.pop("tried"))
        return Foresight(values=_keys(raw.pop("values")), phases=phases, tried=tried, **raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _to_json(found: Foresight) -> dict[str, Any]:
    raw = asdict(found)
    raw["values"] = named(found.values)
    raw["tried"] = [{**asdict(one), "values": named(one.values)} for one in found.tried]
    return raw


def named(values: Mapping[Key, Any]) -> dict[str, Any]:
    """("memory", "block_streaming") -> "memory.block_streaming"."""
    return {".".join(key): value for key, value in values.items()}


def _keys(values: Mapping[str, Any]) -> dict[Key, Any]:
    return {(key.partition(".")[0], key.partition(".")[2]): value for key, value in values.items()}
