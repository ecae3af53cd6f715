"""Curves of the learning rate after its warm-up."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from . import Row, table


@dataclass(frozen=True)
class Schedule(Row):
    shape: Callable[..., float]
    """(steps done, steps in all, what it reads) -> from 1 at none of them to 0 at all."""


def _constant(done: int, span: int) -> float:
    return 1.0


def _linear(done: int, span: int) -> float:
    return 1 - done / span


def _cosine(done: int, span: int) -> float:
    return (1 + math.cos(math.pi * (done / span))) / 2


def _cosine_restarts(done: int, span: int, lr_cycles: int) -> float:
    # Restarts counted in whole numbers: a float remainder would make some restarts late by one step.
    return _cosine(done * lr_cycles % span if done < span else span, span)


def _polynomial(done: int, span: int, lr_power: float) -> float:
    return _linear(done, span) ** lr_power


SCHEDULES = table(
    Schedule("constant", _constant, pt=("constante",)),
    Schedule("linear", _linear),
    Schedule("cosine", _cosine, pt=("cosseno",)),
    Schedule("cosine_restarts", _cosine_restarts, pt=("cosseno_reinicios",), reads=("lr_cycles",)),
    Schedule("polynomial", _polynomial, pt=("polinomial",), reads=("lr_power",)),
)
