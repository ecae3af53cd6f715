"""Each parameter stepped as soon as its gradient is complete (techniques/optimizer_in_backward.py). One optimizer a
parameter; `step` only finishes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..seam.technique import Groups
from .per_parameter import PerParameter


class InBackward(PerParameter):
    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]) -> None:
        super().__init__(groups, build)
        self._squares: Tensor | None = None
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._step_one) for parameter in self._inner]

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        square = parameter.grad.float().square().sum()
        self._squares = square if self._squares is None else self._squares + square
        super()._step_one(parameter)
        parameter.grad = None

    @property
    def begun(self) -> bool:
        return self._squares is not None

    def grad_norm(self) -> Tensor:
        """Of the backward pass just made, before `step`, (); not finite means that the weights are spoiled already."""
        return torch.zeros(()) if self._squares is None else self._squares.sqrt()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only gradients that no backward pass left, but somebody set, are still there to step on."""
        super().step(closure)
        self._squares = None

    def close(self) -> None:
        """Leave the parameters alone, so that another optimizer may have them."""
        for hook in self._hooks:
            hook.remove()
