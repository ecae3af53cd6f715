"""Step each parameter as soon as its gradient is complete, and free the gradient (Lv et al. 2023, LOMO; torch's tutorial).

There is one optimizer a parameter (_per_parameter.py); `step` only finishes. The learning rate must be set before the
backward pass. What needs all gradients at once (clipping by their norm, several micro-batches a step, a loss scaler, an
optimizer with one estimate for all) cannot go with it; nor can a window be redone once its backward pass began.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import TrainingConfig
from ..errors import t
from ..machine.hardware import Precision
from ..optim.optimizers import build_optimizer
from ..optim.per_parameter import PerParameter, not_separable
from ..seam.technique import Groups, OptimizerTechnique


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


@dataclass(frozen=True)
class OptimizerInBackward(OptimizerTechnique):
    def build(self, groups: Groups, settings: TrainingConfig) -> InBackward:
        return InBackward(groups, lambda part: build_optimizer(part, settings))

    def conflicts(self, settings: TrainingConfig, precision: Precision) -> str | None:
        """Why it cannot be used with these settings, if so."""
        reasons = []
        if settings.gradient_accumulation_steps > 1:
            reasons.append(
                t(
                    pt="passos_acumulacao_gradiente maior que 1 (os gradientes precisam ser somados)",
                    en="gradient_accumulation_steps above 1 (gradients must be summed)",
                )
            )
        if settings.max_grad_norm:
            reasons.append(
                t(
                    pt="norma_maxima_gradiente acima de 0 (a norma é a de todos os gradientes juntos)",
                    en="max_grad_norm above 0 (the norm is that of all gradients together)",
                )
            )
        if precision.scaler:
            reasons.append(
                t(
                    pt="precisao_mista: fp16 (um passo com estouro não poderia ser refeito)",
                    en="mixed_precision: fp16 (a step that overflows could not be redone)",
                )
            )
        if whole := not_separable(settings):
            reasons.append(whole)
        return "; ".join(reasons) or None


TECHNIQUE = OptimizerInBackward
