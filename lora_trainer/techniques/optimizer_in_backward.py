"""Step each parameter as soon as its gradient is complete, and free the gradient (Lv et al. 2023, LOMO; torch's tutorial).

There is one optimizer a parameter (optim/in_backward.py). The learning rate must be set before the backward pass. What needs
all gradients at once (clipping by their norm, several micro-batches a step, a loss scaler, an optimizer with one estimate
for all) cannot go with it; nor can a window be redone once its backward pass began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.declared import Conflict, Declared
from ..seam.technique import RESIDENT, Groups, OptimizerTechnique
from ._apart import one_estimate_for_all

if TYPE_CHECKING:
    from ..config.schema import TrainingConfig
    from ..optim.in_backward import InBackward

SWITCH = Declared(
    ("memory", "optimizer_in_backward"), "otimizador_no_backward", place=110, phases=RESIDENT, default="no",
    elsewhere="fused_backward_pass", docs=(
        "Atualiza cada peso assim que seu gradiente existe; sem acumulação e sem corte de gradiente.",
        "Step each weight as soon as its gradient exists; without accumulation and without clipping."))


class OptimizerInBackward(OptimizerTechnique):
    title = ("passo dentro do backward", "step in the backward pass")
    when = ("sem acumulação e sem corte de gradiente", "no accumulation, no clipping")
    options = (SWITCH,)
    asked_only = True
    """It forbids clipping, which is the user's to give up."""
    excludes = (
        Conflict(
            SWITCH.key, ("training", "gradient_accumulation_steps"), lambda c: c.training.gradient_accumulation_steps > 1,
            ("`{first}` não anda com `{second}` maior que 1: o peso mudaria a cada micro-lote",
             "`{first}` excludes `{second}` above 1: the weight would change at every micro-batch"),
            ("use `{second}: 1` ou apague `{first}`", "use `{second}: 1` or delete `{first}`")),
        Conflict(
            SWITCH.key, ("training", "max_grad_norm"), lambda c: c.training.max_grad_norm > 0,
            ("`{first}` não anda com o corte de gradiente, que só se calcula com todos os gradientes à mão",
             "`{first}` excludes gradient clipping, which needs all gradients at once"),
            ("use `{second}: 0` ou apague `{first}`", "use `{second}: 0` or delete `{first}`")),
        one_estimate_for_all(SWITCH.key),
        Conflict(
            SWITCH.key, ("training", "mixed_precision"), lambda c: c.training.mixed_precision == "fp16",
            ("`{first}` não anda com `{second}: fp16`: um passo com estouro não poderia ser refeito",
             "`{first}` excludes `{second}: fp16`: a step that overflows could not be made again"),
            ("use `{second}: bf16` ou `nao`, ou apague `{first}`", "use `{second}: bf16` or `no`, or delete `{first}`")),
        Conflict(
            ("training", "ema"), SWITCH.key, lambda c: c.training.ema > 0,
            ("`{first}` não anda com `{second}`, que atualiza cada peso num momento seu",
             "`{first}` excludes `{second}`, which updates each weight at a moment of its own"),
            ("apague um dos dois", "delete one of the two")),
    )

    def build(self, groups: Groups, settings: TrainingConfig) -> InBackward:
        from ..optim.in_backward import InBackward
        from ..optim.optimizers import build_optimizer

        return InBackward(groups, lambda part: build_optimizer(part, settings))


TECHNIQUE = OptimizerInBackward
