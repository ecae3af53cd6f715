"""From a question to its answer: the family opened without weights, the options solved, every phase simulated.

Simulations are kept on disk: the same plan of the same run need not be simulated again for another card.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ..atomic import keep_json
from ..config.declared import with_values
from ..config.names import Key
from ..engine.tracker import PhasePeak
from ..families import resolve
from ..machine.hardware import NAMES, Precision
from ..seam.family import Family, ImageFamily
from ..techniques.block_streaming import MASTER
from .caching import Encoding, plan_caching
from .foresee import Foresight, Question, Tried, keep
from .plan import Candidate, Planner
from .rungs import Rungs
from .simulate import Prediction, Shape

DTYPES = {name: dtype for dtype, name in NAMES.items()}
ORDER = ("load", "forward", "backward", "optimizer", "validation", "preview")
ADAPTER_KEPT = ("adapter", "optimizer")
"""What a saved state holds."""
IRRELEVANT: dict[Key, Any] = {
    ("memory", "preset"): "none",
    ("memory", "vram"): None,
    ("memory", "ram"): None,
    MASTER.key: "auto",
}
"""To a simulation."""
_PREDICTION = TypeAdapter(Prediction)


def foresee(question: Question, folder: Path) -> Foresight:
    """Solve the `auto` options and simulate every phase; the answer is kept in `folder`, and so are the simulations.

    Raises SourceError or ConfigError for bases and options that cannot be trained.
    """
    config, dtype = question.config, DTYPES[question.precision]
    family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)
    size = question.resolution or family.largest(config)
    shape = Shape(
        question.batch_size,
        size,
        config.training.gradient_accumulation_steps,
        previews=bool(config.samples.prompts),
        validation=config.data.validation_fraction > 0,
        preview_resolution=config.samples.resolution,
    )
    precision = Precision(dtype, dtype, scaler=dtype is torch.float16)
    planner = Planner(
        family,
        config,
        precision,
        shape,
        question.available,
        question.written,
        question.preset_first,
        partial(_recall, replace(question, available=None, written=frozenset(), preset_first=False), folder),
    )
    best = planner.solve()
    encoding, phases = _caching(question, family, dtype, size)
    phases |= {name: best.prediction.phases[name] for name in ORDER if name in best.prediction.phases}
    fits = best.fits(question.available)
    rungs = Rungs(planner, best)
    found = Foresight(
        values=best.values,
        micro_batch=best.micro_batch,
        phases=phases,
        fits=fits,
        lossless=best.lossless,
        flops=best.prediction.flops,
        transferred=best.prediction.transferred,
        tried=tuple(_tried(one) for one in planner.tried),
        below=() if question.available is None else tuple(rungs.below()),
        without=rungs.without(),
        saves=rungs.saves(simulate=not fits),
        encoding=json.loads(json.dumps(asdict(encoding))),  # as it comes back from the cache
        cache_bytes=_cache_bytes(family, size),
        texts=not isinstance(family, ImageFamily),
        adapter_bytes=sum(best.prediction.phases["optimizer"].causes[cause] for cause in ADAPTER_KEPT),
    )
    keep(found, question, folder)
    return found


def _recall(
    question: Question, folder: Path, values: Mapping[Key, Any], simulate: Callable[[], Prediction]
) -> Prediction:
    """The prediction for these options, simulated if it must be. The key is the question's with the plan's values in place."""
    config = with_values(question.config, {**values, **IRRELEVANT})
    path = folder / f"{replace(question, config=config).key()}-simulated.json"
    with contextlib.suppress(OSError, ValueError):  # none, or a damaged one
        return _PREDICTION.validate_json(path.read_bytes())
    prediction = simulate()
    keep_json(path, asdict(prediction))
    return prediction


def _caching(
    question: Question, family: Family, dtype: torch.dtype, size: tuple[int, int]
) -> tuple[Encoding, dict[str, PhasePeak]]:
    """Texts need no encoding."""
    if not isinstance(family, ImageFamily):
        return Encoding.of(question.config.memory, question.written), {}
    return plan_caching(family, question.config, dtype, size, question.available, question.written)[:2]


def _tried(candidate: Candidate) -> Tried:
    cost = candidate.prediction
    return Tried(candidate.values, candidate.peak, cost.flops, cost.transferred, candidate.micro_batch)


def _cache_bytes(family: Family, size: tuple[int, int]) -> tuple[int, int]:
    """(of an image, of a caption): what a batch holds beside its seeds and weights. Texts are not kept on disk."""
    if not isinstance(family, ImageFamily):
        return 0, 0
    example = family.example_batch(1, size)
    sizes = {name: tensor.nbytes for name, tensor in example.items() if name not in ("seeds", "weight")}
    of_image = sum(size for name, size in sizes.items() if name in ("latents", "time_ids", "mask"))
    return of_image, sum(sizes.values()) - of_image
