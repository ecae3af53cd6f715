"""An average of the adapter over the steps (Polyak & Juditsky 1992), for validation, previews and files; training goes on
with its own weights.

It lives in the optimizer's state, so saving, resuming and foreseeing its memory need nothing of their own. The first steps
count for more than `decay` says, or the start would stay in the average for long. Left out: several averages at once.
"""

from collections.abc import Iterator
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


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, parameters hold their averages, if there are any; afterwards their own values, bit for bit."""
    params = [p for group in optimizer.param_groups for p in group["params"] if NAME in optimizer.state.get(p, {})]
    kept = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.copy_(optimizer.state[p][NAME])
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)
