"""How captions and images are encoded, and previews decoded: the rungs, which of them fits, and what comes after an OOM.

An `Encoding` is a rung of two ladders. Planning goes down them on fake tensors and takes the first that fits; after an
out-of-memory in mid-run the next one is taken, as long as it changes no caption's numbers. What the user wrote stays.
Streaming is exact; a quantised encoder is not, so its entries have keys of their own, and so have images encoded in tiles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from ..config.names import Key, shown
from ..config.schema import Config, MemoryConfig
from ..engine.tracker import PhasePeak
from ..engine.vae_tiling import tiles_change
from ..errors import DoesNotFitError, t
from ..seam.family import ImageFamily
from .advice import phase_title
from .ladder import LADDER, Step, tighter
from .simulate import simulate_captions, simulate_images

TEXTS = tuple(step for step in LADDER if "text_cache" in step.option.phases)
IMAGES = tuple(step for step in LADDER if "latent_cache" in step.option.phases and step not in TEXTS)
OPTIONS = tuple(step.key[1] for step in (*TEXTS, *IMAGES))
"""Of the section `memory`."""

OnOom = Callable[[str, str], None]
"""Hears of the phase in which memory ran out and of the rung that is taken now (`rung_title` says it to people)."""


def unheard(phase: str, rung: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Encoding:
    """Plain values only: `to_json` can be kept in a file, and `from_json` brings it back."""

    text_streaming: bool = False
    text_quantization: str = "no"
    vae_tiling: bool = False
    text_on_cpu: bool = False
    images_on_cpu: bool = False
    mixed: bool = False
    """Memory ran out among the images: some are encoded whole, some in tiles, and both kinds count."""
    preview_tiling: str = "auto"
    fixed: tuple[str, ...] = ()
    """The OPTIONS that are not ours to change."""

    @classmethod
    def of(cls, memory: MemoryConfig, written: Iterable[Key] | None = None) -> "Encoding":
        """What the options say; where they say auto, plain and whole.

        `written`: options that are the user's own (by default all that are not at auto); a preset's may be tightened.
        """
        values = {name: getattr(memory, name) for name in OPTIONS}
        own = set(OPTIONS) if written is None else {name for section, name in written if section == "memory"}
        fixed = tuple(name for name in OPTIONS if name in own and values[name] != "auto")
        return cls(
            text_streaming=values["text_streaming"] == "yes",
            text_quantization="no" if values["text_quantization"] == "auto" else values["text_quantization"],
            vae_tiling=values["vae_tiling"] == "yes",
            preview_tiling=values["vae_tiling"] if "vae_tiling" in fixed or values["vae_tiling"] == "yes" else "auto",
            fixed=fixed,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Encoding":
        """Names it does not know are passed over: they are another version's."""
        known: dict[str, Any] = {field.name: raw[field.name] for field in fields(cls) if field.name in raw}
        return cls(**{**known, "fixed": tuple(known.get("fixed", ()))})

    def resumed(self, before: "Encoding") -> "Encoding":
        """This one, where an earlier start of the run came down to `before`; what the user has fixed since stays."""
        names = [*(name for name in OPTIONS if name not in self.fixed), "text_on_cpu", "images_on_cpu"]
        names += [] if "vae_tiling" in self.fixed else ["mixed", "preview_tiling"]
        kept: dict[str, Any] = {name: getattr(before, name) for name in names}
        return replace(self, **kept)

    def values(self) -> dict[Key, Any]:
        """As options: {("memory", "text_streaming"): "yes", …}, for the table of a plan."""
        words = {True: "yes", False: "no"}
        return {("memory", name): words.get(value, value) for name in OPTIONS for value in (getattr(self, name),)}

    def tighter(self, steps: tuple[Step, ...], phase: str) -> "Encoding | None":
        """The next rung of the ladder, as far as the user leaves it open."""
        fixed: frozenset[Key] = frozenset(("memory", name) for name in self.fixed)
        values = tighter(self.values(), fixed, phase, steps)
        words: dict[Any, Any] = {"yes": True}
        if values is None:
            return None
        changed = {key: value for key, value in values.items() if value != self.values()[key]}
        return replace(self, **{key[1]: words.get(value, value) for key, value in changed.items()})


# -- after an out-of-memory


def next_rung(encoding: Encoding, phase: str) -> Encoding | None:
    """What to try after an out-of-memory in text_cache or latent_cache; None below the last rung."""
    if phase == "text_cache":
        if encoding.text_on_cpu:
            return None
        lower = encoding.tighter(tuple(step for step in TEXTS if step.lossless), phase)
        return lower or replace(encoding, text_streaming=False, text_on_cpu=True)
    assert phase == "latent_cache", phase
    if encoding.images_on_cpu:
        return None
    lower = encoding.tighter(IMAGES, phase) or replace(encoding, vae_tiling=False, images_on_cpu=True)
    return replace(lower, mixed=True) if "vae_tiling" not in encoding.fixed else replace(encoding, images_on_cpu=True)


def rung_name(encoding: Encoding, phase: str) -> str:
    """ "streamed", "tiled" or "cpu": what `next_rung` has just switched on."""
    if encoding.text_on_cpu if phase == "text_cache" else encoding.images_on_cpu:
        return "cpu"
    return "streamed" if phase == "text_cache" else "tiled"


def rung_title(phase: str, rung: str) -> str:
    """One line for the user."""
    titles = {
        "streamed": t(pt="a partir de agora, camada por camada", en="layer by layer from now on"),
        "tiled": t(pt="a partir de agora, em blocos", en="in tiles from now on"),
        "cpu": t(pt="a partir de agora, na CPU", en="on the CPU from now on"),
        "one": t(pt="a partir de agora, uma imagem por vez e em blocos", en="one image at a time, in tiles, from now on"),
        "alone": t(pt="uma resposta por vez a partir de agora", en="one answer at a time from now on"),
        "skipped": t(pt="pulada; o treino continua", en="skipped; training goes on"),
    }
    where = phase_title(phase)
    return t(
        pt=f"faltou memória ({where}): {titles.get(rung, rung)}", en=f"out of memory ({where}): {titles.get(rung, rung)}"
    )


def exhausted(encoding: Encoding, phase: str, problem: str) -> DoesNotFitError:
    """Exit code 3: not even the CPU could do it. `problem` is what the allocator said."""
    ways = [t(pt="feche outros programas, para liberar RAM", en="close other programs, to free host RAM")]
    options = []
    tightest = next(step.values[-1] for step in TEXTS if not step.lossless)
    if phase == "text_cache" and encoding.text_quantization != tightest:
        options.append(("text_quantization", tightest))
    if phase == "latent_cache" and not encoding.vae_tiling:
        options.append(("vae_tiling", t(pt="sim", en="yes")))
    ways += [f"{shown('memory', name)}={word}" for name, word in options]
    where = phase_title(phase)
    return DoesNotFitError(
        t(
            pt=f"faltou memória em {where}, também na CPU ({problem})",
            en=f"out of memory in {where}, on the CPU as well ({problem})",
        ),
        t(pt=" ou ", en=" or ").join(ways) + t(pt="; o que já foi codificado fica", en="; what was encoded is kept"),
    )


# -- before the start


def plan_caching(
    family: ImageFamily,
    config: Config,
    dtype: torch.dtype,
    resolution: tuple[int, int],
    available: int | None,
    written: frozenset[Key] = frozenset(),
) -> tuple[Encoding, dict[str, PhasePeak], bool]:
    """The first rungs that fit `available` bytes, the peaks of text_cache and latent_cache, and whether both fit.

    `resolution`: (width, height) of the largest bucket in pixels. What fits on no rung of the card is done on the CPU.
    """
    encoding = Encoding.of(config.memory, written)
    encoding, texts = _first_that_fits(_text_rungs(encoding), lambda e: _simulate_texts(family, e, dtype), available)
    encoding, images = _first_that_fits(
        _image_rungs(encoding, resolution), lambda e: _simulate_images(family, e, dtype, resolution), available
    )
    phases = {"text_cache": texts, "latent_cache": images}
    return encoding, phases, all(_fits(peak, available) for peak in phases.values())


def _text_rungs(start: Encoding) -> Iterator[Encoding]:
    """Streaming changes no number, so it comes first; the CPU is slowest, so it comes last."""
    lower: Encoding | None = start
    while lower is not None:
        yield lower
        lower = lower.tighter(TEXTS, "text_cache")
    yield replace(start, text_streaming=False, text_on_cpu=True)


def _image_rungs(start: Encoding, size: tuple[int, int]) -> Iterator[Encoding]:
    yield start
    if tiles_change(size) and (tiled := start.tighter(IMAGES, "latent_cache")):
        yield tiled
    yield replace(start, images_on_cpu=True)


def _simulate_texts(family: ImageFamily, e: Encoding, dtype: torch.dtype) -> PhasePeak:
    peak = simulate_captions(family, dtype, quantization=e.text_quantization, streaming=e.text_streaming)
    return _in_host_memory(peak) if e.text_on_cpu else peak


def _simulate_images(family: ImageFamily, e: Encoding, dtype: torch.dtype, size: tuple[int, int]) -> PhasePeak:
    peak = simulate_images(family, dtype, size, tiles=e.vae_tiling)
    return _in_host_memory(peak) if e.images_on_cpu else peak


def _in_host_memory(peak: PhasePeak) -> PhasePeak:
    return PhasePeak(0, dict.fromkeys(peak.causes, 0), peak.host + peak.total)


def _first_that_fits(
    rungs: Iterable[Encoding], simulate: Callable[[Encoding], PhasePeak], available: int | None
) -> tuple[Encoding, PhasePeak]:
    tried = []
    for encoding in rungs:
        tried.append((encoding, simulate(encoding)))
        if _fits(tried[-1][1], available):
            return tried[-1]
    return min(tried, key=lambda one: one[1].total)


def _fits(peak: PhasePeak, available: int | None) -> bool:
    return available is None or peak.total <= available
