"""The weights to look at, where they are not those in training: an average of the adapter over the steps (Polyak &
Juditsky 1992), or a schedule-free optimizer's own; for validation, previews and files.

The average lives in the optimizer's state, so saving, resuming and foreseeing its memory need nothing of their own. The first steps
count for more than `decay` says, or the start would stay in the average for long. Left out: several averages at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

NAME = "ema"
STEPS = "ema_steps"


def attach(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Average every parameter after each step from now on."""

    @torch.no_grad()
    def follow(optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            steps = group[STEPS] = group.get(STEPS, 0) + 1
            share = 1 - min(decay, (1 + steps) / (10 + steps))  # as in TensorFlow's ExponentialMovingAverage
            for parameter in group["params"]:
                if parameter.grad is None and not optimizer.state.get(parameter):
                    continue  # a layer that reaches no output never moves; optimizers expect no state of it either
                state = optimizer.state[parameter]
                if NAME in state:
                    state[NAME].lerp_(parameter, share)
                else:
                    state[NAME] = parameter.detach().clone()

    optimizer.register_step_post_hook(follow)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Of a run resumed without it: an average that follows no more is of no use."""
    for group in optimizer.param_groups:
        group.pop(STEPS, None)
        for parameter in group["params"]:
            optimizer.state.get(parameter, {}).pop(NAME, None)


def set_training(optimizer: torch.optim.Optimizer, training: bool) -> None:
    """Schedule-free optimizers hold one point to train at and another to use; the others hold one for both."""
    switch = getattr(optimizer, "train" if training else "eval", None)
    if switch is not None:
        switch()


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The weights to validate, preview and export with; training weights come back bit for bit afterwards."""
    schedule_free = hasattr(optimizer, "eval")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    params = [p for p in params if schedule_free or NAME in optimizer.state.get(p, {})]
    kept = [p.detach().clone() for p in params]
    try:
        set_training(optimizer, False)
        if not schedule_free:
            _copy([optimizer.state[p][NAME] for p in params], params)
        yield
    finally:
        set_training(optimizer, True)
        _copy(kept, params)


@torch.no_grad()
def _copy(values: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        p.copy_(value)
