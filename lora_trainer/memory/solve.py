"""From a question to its answer: the family opened without weights, the options solved, every phase simulated."""

from pathlib import Path

import torch

from ..families import resolve
from ..hardware import NAMES, Precision
from .foresee import Foresight, Question, Tried
from .plan import Planner, with_values
from .simulate import Shape, simulate_between, simulate_caching, simulation_device
from .techniques import make_plan

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def answer(question: Question) -> Foresight:
    """Raises SourceError or ConfigError for bases and options that cannot be trained."""
    config, dtype = question.config, DTYPES[question.precision]
    precision = Precision(dtype, dtype, scaler=dtype is torch.float16)
    family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)
    shape = Shape(
        question.batch_size,
        question.resolution,
        question.accumulation,
        previews=question.previews,
        validation=question.validation,
        preview_resolution=config.samples.resolution,
    )
    planner = Planner(family, config, precision, shape, question.available, question.written)
    best = planner.solve()
    solved = with_values(config, best.values)
    plan = make_plan(solved, precision, simulation_device(), Path())
    phases = dict(simulate_caching(family, dtype, shape.resolution).phases)
    phases |= best.prediction.phases
    if shape.previews or shape.validation:
        phases |= simulate_between(family, solved, dtype, plan, shape).phases
    fits = question.available is None or max(phase.total for phase in phases.values()) <= question.available
    tried = tuple(
        Tried(one.values, one.training_peak, one.prediction.flops, one.prediction.transferred) for one in planner.tried
    )
    cost = best.prediction
    return Foresight(best.values, phases, fits, best.lossless, cost.flops, cost.transferred, tried)
