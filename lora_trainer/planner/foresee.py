"""A whole run foreseen: the solved options, every phase's peak, the time of a step; kept on disk.

The cache cannot go stale: its key holds the source code of this package, the versions of the libraries that run in a
simulation, the base's header or config files, and all options that the run's memory depends on. Looking an answer up
imports none of the heavy libraries.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..atomic import keep_json
from ..config.names import Key
from ..config.schema import Config
from ..engine.tracker import PhasePeak
from ..files.gguf_reader import is_gguf, open_gguf
from ..files.sources import Source
from ..units import in_gib

LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes")
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Tried:
    """A set of options, bytes of its peak, and what a step costs."""

    values: dict[Key, Any]
    peak: int
    flops: int
    transferred: int
    micro_batch: int
    """Images at once."""
    simulated: bool = True
    """False for what was only worked out from another simulation."""


@dataclass(frozen=True)
class Foresight:
    """Bytes. `values` are the options solved; `phases` are in the order of the run."""

    values: dict[Key, Any]
    micro_batch: int
    """Examples at once: fewer than the config says where nothing else fits, and as many more times."""
    phases: dict[str, PhasePeak]
    fits: bool
    lossless: bool
    flops: int
    transferred: int
    tried: tuple[Tried, ...]
    """What was simulated, in that order."""
    below: tuple[Tried, ...] = ()
    """The rungs that a shortage in mid-run would go down, one by one."""
    without: dict[Key, int] = field(default_factory=dict)
    """Option that is on -> bytes of the peak if it were not."""
    saves: dict[Key, int] = field(default_factory=dict)
    """Option that could be changed -> bytes that it would take off the peak; rough, except where nothing fits."""
    encoding: dict[str, Any] = field(default_factory=dict)
    """How captions and images are encoded, as caching.Encoding.from_json reads it."""
    cache_bytes: tuple[int, int] = (0, 0)
    """On disk, of one image and of one caption."""
    adapter_bytes: int = 0
    texts: bool = False
    """The family learns from texts: sizes are tokens."""

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases.values())

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def host(self) -> int:
        return max(phase.host for phase in self.phases.values())

    def phases_in_gib(self) -> dict[str, dict[str, float]]:
        """Phase -> total, host and causes."""
        phases = {name: {"total": peak.total, "host": peak.host, **peak.causes} for name, peak in self.phases.items()}
        return {name: {cause: in_gib(count) for cause, count in counts.items()} for name, counts in phases.items()}


@dataclass(frozen=True)
class Question:
    """What an answer depends on. `available`: bytes for live tensors; `written`: options that are the user's."""

    config: Config
    source: Source | None
    """None stands for the architecture shipped for `config.model.family`."""
    precision: str
    """Name of the compute dtype."""
    batch_size: int
    resolution: tuple[int, int] | None
    """Of the largest example, as Family.example_batch takes it; None is what the config allows."""
    available: int | None
    written: frozenset[Key]
    preset_first: bool = False
    """The user named the preset that lies beneath."""

    def key(self) -> str:
        options = self.config.model_dump(mode="json", include={"model", "training", "memory", "data", "samples"})
        for private in ("base_model", "vae", "tokenizer", "architecture", "initial_lora"):
            options["model"].pop(private)
        if worn := options["model"]["training_lora"]:
            options["model"]["training_lora"] = Path(worn).stat().st_size if Path(worn).is_file() else None
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("config", "source", "written")}
        facts = [_code(), options, own, sorted(self.written), _architecture(self.source)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def known_answer(question: Question, folder: Path) -> Foresight | None:
    """What was worked out before; None for a new question or a damaged answer."""
    try:
        raw = json.loads((folder / f"{question.key()}.json").read_text(encoding="utf-8"))
        raw["phases"] = {name: PhasePeak(**peak) for name, peak in raw["phases"].items()}
        for name in _BY_OPTION:
            raw[name] = keys(raw[name])
        for name in ("tried", "below"):
            raw[name] = tuple(Tried(**{**one, "values": keys(one["values"])}) for one in raw[name])
        return Foresight(**{**raw, "cache_bytes": tuple(raw["cache_bytes"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(found: Foresight, question: Question, folder: Path) -> None:
    """For `known_answer`."""
    raw = asdict(found)
    for name in _BY_OPTION:
        raw[name] = named(raw[name])
    for name in ("tried", "below"):
        raw[name] = [{**one, "values": named(one["values"])} for one in raw[name]]
    keep_json(folder / f"{question.key()}.json", raw)


_BY_OPTION = ("values", "without", "saves")
"""Fields whose keys are options."""


def _architecture(source: Source | None) -> object:
    """Shapes, not weights: a file's header, or the config files of a folder."""
    if source is None:
        return None
    if source.kind == "file" and is_gguf(source.path):
        file = open_gguf(source.path, source.what)
        plain = {name: value for name, value in file.metadata.items() if not name.startswith("tokenizer.")}
        return [str(plain), [[name, info.dtype, list(info.shape)] for name, info in file.tensors.items()]]
    if source.kind == "file":
        return [[name, info.dtype, list(info.shape)] for name, info in source.tensors.items()]
    configs = sorted(source.path.rglob("*config.json"))
    return [[path.relative_to(source.path).as_posix(), path.read_text(encoding="utf-8")] for path in configs]


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
    return digest.hexdigest()


def named(values: Mapping[Key, Any]) -> dict[str, Any]:
    """("memory", "block_streaming") -> "memory.block_streaming"."""
    return {".".join(key): value for key, value in values.items()}


def named_gib(counts: Mapping[Key, int]) -> dict[str, float]:
    return {name: in_gib(count) for name, count in named(counts).items()}


def keys(values: Mapping[str, Any]) -> dict[Key, Any]:
    return {(key.partition(".")[0], key.partition(".")[2]): value for key, value in values.items()}
