"""Step each parameter as soon as its gradient is complete, and free the gradient (Lv et al. 2023, LOMO; torch's tutorial).

One optimizer a parameter, of the kind the settings name, behind one object that looks like the usual optimizer: same
groups, same state, so states are saved and resumed either way. Its `step` only finishes. The learning rate must be set
before the backward pass. What needs all gradients at once (clipping by their norm, several micro-batches a step, a loss
scaler, an optimizer with one estimate for all) cannot go with it; nor can a window be redone once its backward pass began.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.schema import TrainingConfig
from ..errors import t
from ..hardware import Precision
from ..optimizers import Groups, build_optimizer, resolve_name
from ._base import OptimizerTechnique

NOT_SEPARABLE = ("prodigy", "schedulefree_adamw")
"""One estimate, or one average of the run, for all parameters."""


class InBackward(torch.optim.Optimizer):
    """Looks like the one optimizer that all these are instead of."""

    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self._inner: dict[nn.Parameter, tuple[torch.optim.Optimizer, int]] = {}
        self._squares: Tensor | None = None
        self._hooks = []
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._inner[parameter] = (build([{**group, "params": [parameter]}]), place)
                self._mirror(parameter)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._step_one))

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        square = parameter.grad.float().square().sum()
        self._squares = square if self._squares is None else self._squares + square
        inner, place = self._inner[parameter]
        inner.param_groups[0]["lr"] = self.param_groups[place]["lr"]
        inner.step()
        parameter.grad = None
        self._mirror(parameter)

    def _mirror(self, parameter: nn.Parameter) -> None:
        """Show the state of one of them as part of the whole; some count their steps in the group."""
        inner, place = self._inner[parameter]
        if parameter in inner.state:
            self.state[parameter] = inner.state[parameter]
        kept = ("params", "lr", "base_lr")
        self.param_groups[place].update((k, v) for k, v in inner.param_groups[0].items() if k not in kept)

    @property
    def begun(self) -> bool:
        return self._squares is not None

    def grad_norm(self) -> Tensor:
        """Of the backward pass just made, before `step`, (); not finite means that the weights are spoiled already."""
        return torch.zeros(()) if self._squares is None else self._squares.sqrt()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Only gradients that no backward pass left, but somebody set, are still there to step on."""
        for parameter in self._inner:
            if parameter.grad is not None:
                self._step_one(parameter)
        self._squares = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Through each one's own loading, which knows its dtypes."""
        for place, saved in enumerate(state_dict["param_groups"]):
            self.param_groups[place].update((key, value) for key, value in saved.items() if key != "params")
            for number, parameter in zip(saved["params"], self.param_groups[place]["params"], strict=True):
                own = {number: state_dict["state"][number]} if number in state_dict["state"] else {}
                one = {"state": own, "param_groups": [{**saved, "params": [number]}]}
                self._inner[parameter][0].load_state_dict(one)
                self._mirror(parameter)

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
        if (name := resolve_name(settings)) in NOT_SEPARABLE:
            reasons.append(
                t(
                    pt=f"otimizador: {name} (usa uma estimativa comum a todos os parâmetros)",
                    en=f"optimizer: {name} (has one estimate for all parameters)",
                )
            )
        return "; ".join(reasons) or None


TECHNIQUE = OptimizerInBackward
