"""The one training loop. It knows no family and no technique.

Every optimizer step is a pure function of the state before it and of the step's number: the window of batches, the
noise (from each example's seed) and the dropout (seeded here) can all be rebuilt. So a step may be redone, and an
interrupted run continues bit for bit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .errors import DivergedError, t
from .seam.family import Batch, Family
from .techniques import MemoryPlan


class Schedule(Protocol):
    def __call__(self, step: int) -> float:
        """Factor on every learning rate for the optimizer step with this number, counted from 0."""
        ...


@runtime_checkable
class StepsInBackward(Protocol):
    """An optimizer that has stepped by the time the backward pass ends; it knows the norm that was."""

    @property
    def begun(self) -> bool:
        """Whether weights have changed since the last step was finished."""
        ...

    def grad_norm(self) -> float: ...


class TornUpdate(Exception):
    """What failed (`__cause__`) did so while weights were being updated: some are of this step, some of the one before."""


@dataclass(frozen=True)
class Trainee:
    """What is trained and with what."""

    family: Family
    model: nn.ModuleDict
    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    plan: MemoryPlan
    device: torch.device
    seed: int
    max_grad_norm: float


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: `loss` is the mean over its terms, `grad_norm` before clipping."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    terms: int


def train(trainee: Trainee, windows: Iterable[tuple[int, list[Batch]]], schedule: Schedule) -> Iterator[StepReport]:
    """Yield a report after each optimizer step; the caller logs, validates, previews and saves.

    Raises DivergedError when the loss or the gradient is not finite; the weights are then those of the step before. So
    they are after an out-of-memory, but for TornUpdate (and any of a StepsInBackward).
    """
    trainee.model.train()
    for step, window in windows:
        rate = _set_learning_rate(trainee.optimizer, schedule(step))
        terms = sum(trainee.family.num_terms(batch) for batch in window)
        loss, norm = _checked_gradients(trainee, window, step, terms)
        while not math.isfinite(norm):  # float16 gradients overflowed: redo this window at a smaller scale
            _shrink_scale(trainee, step)
            loss, norm = _checked_gradients(trainee, window, step, terms)
        _update(trainee)
        trainee.optimizer.zero_grad(set_to_none=True)
        yield StepReport(step + 1, loss, norm, rate, terms)


def _update(trainee: Trainee) -> None:
    try:
        trainee.scaler.step(trainee.optimizer)
        trainee.scaler.update()
    except Exception as error:
        raise TornUpdate(str(error)) from error


def gradients(trainee: Trainee, window: list[Batch], step: int, terms: int) -> tuple[Tensor, Tensor]:
    """Accumulate the window's gradients, each summed loss divided by the window's count of terms; clip them.

    Returns loss and gradient norm, both (). Nothing here waits for the device, so it runs on fake tensors too.
    """
    total = torch.zeros((), device=trainee.device)
    for index, batch in enumerate(window):
        torch.manual_seed(mix(trainee.seed, step, index))  # dropout
        with trainee.plan.step_context():
            loss = trainee.family.loss(trainee.model, to_device(batch, trainee.device)) / terms
        total += loss.detach()
        trainee.scaler.scale(loss).backward()
    if isinstance(trainee.optimizer, StepsInBackward):
        return total, torch.as_tensor(trainee.optimizer.grad_norm())
    trainee.scaler.unscale_(trainee.optimizer)
    return total, nn.utils.clip_grad_norm_(trainee.params, trainee.max_grad_norm or math.inf)


def _checked_gradients(trainee: Trainee, window: list[Batch], step: int, terms: int) -> tuple[float, float]:
    total, norm = gradients(trainee, window, step, terms)
    if not math.isfinite(total):
        raise _diverged(step, t(pt="a perda", en="the loss"))
    return float(total), float(norm)


def _shrink_scale(trainee: Trainee, step: int) -> None:
    if not trainee.scaler.is_enabled() or trainee.scaler.get_scale() <= 1:
        raise _diverged(step, t(pt="o gradiente", en="the gradient"))
    trainee.scaler.update()
    trainee.optimizer.zero_grad(set_to_none=True)


def _set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Scale every group's `base_lr`; return the first group's rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def _diverged(step: int, what: str) -> DivergedError:
    return DivergedError.said(
        pt=f"o treino divergiu no passo {step + 1}: {what} não é um número finito",
        en=f"training diverged at step {step + 1}: {what} is not a finite number",
        hint_pt="reduza treino.taxa_aprendizado; em fp16 experimente treino.precisao_mista: bf16 ou nao",
        hint_en="lower training.learning_rate; under fp16 try training.mixed_precision: bf16 or no",
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Everything but the seeds, which drive CPU generators."""
    return {name: value if name == "seeds" else value.to(device, non_blocking=True) for name, value in batch.items()}


def mix(seed: int, step: int, index: int) -> int:
    """A 63-bit seed from three numbers (multipliers of Knuth's and L'Ecuyer's generators)."""
    value = seed * 6364136223846793005 + step * 3935559000370003845 + index * 2691343689449507681 + 1442695040888963407
    value &= 2**64 - 1
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9 & (2**64 - 1)) >> 1
