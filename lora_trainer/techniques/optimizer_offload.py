"""Keep the optimizer's moments in host memory (optim/offloaded.py); each parameter's come to the card for its own update.

Moments are twice the adapter, and idle but for a moment at the end of each step: at high ranks they weigh more than the
activations that are left. The numbers are the same, since AdamW and its like update every parameter by itself. The average
of the adapter (optim/averages.py) lies there too. The copies are not hidden behind computing: twice the moments' bytes a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.declared import Conflict, Declared
from ..seam.technique import RESIDENT, Asked, Groups, OptimizerTechnique
from ._apart import one_estimate_for_all
from .optimizer_8bit import Optimizer8bit

if TYPE_CHECKING:
    from ..config.schema import TrainingConfig
    from ..optim.offloaded import Offloaded

SWITCH = Declared(
    ("memory", "optimizer_offload"), "descarga_otimizador", place=50, phases=RESIDENT, docs=(
        "Guarda na RAM os momentos do otimizador; os de cada peso vêm à placa só para a sua atualização.",
        "Keep the optimizer's moments in RAM; each weight's come to the card for its own update only."))


@dataclass(frozen=True)
class OptimizerOffload(OptimizerTechnique):
    title = ("descarga do otimizador", "optimizer offload")
    when = ("ranks grandes: os momentos esperam na RAM", "large ranks: the moments wait in RAM")
    options = (SWITCH,)
    excludes = (
        Conflict(
            SWITCH.key, ("memory", "optimizer_in_backward"), lambda c: c.memory.optimizer_in_backward == "yes",
            ("`{first}` não anda com `{second}`, que atualiza cada peso no meio do backward",
             "`{first}` excludes `{second}`, which updates each weight in the middle of the backward pass"),
            ("apague um dos dois", "delete one of the two")),
        one_estimate_for_all(SWITCH.key),
    )
    mildness = 50
    """The last of what changes no number: no computing hides these copies."""
    takes = {"optimizer": 1.0}

    inner: OptimizerTechnique | None = None
    """Builds the optimizers, if not the usual one."""

    @classmethod
    def of(cls, asked: Asked) -> OptimizerOffload | None:
        inner = Optimizer8bit() if Optimizer8bit.is_on(asked.config) else None
        return cls(inner) if cls.is_on(asked.config) else None

    def build(self, groups: Groups, settings: TrainingConfig) -> Offloaded:
        from ..optim.offloaded import Offloaded
        from ..optim.optimizers import build_optimizer

        build = self.inner.build if self.inner else build_optimizer
        return Offloaded(groups, lambda part: build(part, settings))


TECHNIQUE = OptimizerOffload
