"""Keep the optimizer's moments in 8 bits (Dettmers et al. 2022): 2 bytes per trained weight instead of 8.

Tensors below 4096 elements keep float32 moments. Paged, those above 100,000 elements lie in memory that the driver moves
to the host when the card is full; LoRA matrices are seldom that large, so paging helps with high ranks only. A simulation
counts paged moments as if they stayed on the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..choices.optimizers import OPTIMIZERS, WITH_8BIT
from ..config.declared import Conflict, Declared
from ..seam.technique import RESIDENT, Asked, Groups, OptimizerTechnique

if TYPE_CHECKING:
    import torch

    from ..config.schema import Config, TrainingConfig

PAGED = {row.unpaged: row.name for row in OPTIMIZERS.values() if row.unpaged}
SWITCH = Declared(
    ("training", "use_8bit_optimizer"), "use_otimizador_8bit", place=100, phases=RESIDENT,
    elsewhere="use_8bit_adam", docs=(
        "Usa a versão de 8 bits do otimizador (bitsandbytes); auto: se o plano precisar.",
        "Use the 8-bit version of the optimizer (bitsandbytes); auto: if the plan needs it."))


@dataclass(frozen=True)
class Optimizer8bit(OptimizerTechnique):
    title = ("otimizador de 8 bits", "8-bit optimizer")
    when = ("ranks grandes", "large ranks")
    options = (SWITCH,)
    excludes = (
        Conflict(
            SWITCH.key, ("training", "optimizer"), lambda c: c.training.optimizer not in WITH_8BIT,
            ("o otimizador `{c.training.optimizer}` não tem versão de 8 bits",
             "the optimizer `{c.training.optimizer}` has no 8-bit version"),
            (f"use um destes: {', '.join(WITH_8BIT)}; ou apague `{{first}}`",
             f"use one of: {', '.join(WITH_8BIT)}; or delete `{{first}}`")),
    )
    mildness = 60
    lossless = False
    takes = {"optimizer": 0.75}

    paged: bool = False

    @classmethod
    def helps(cls, config: Config) -> bool:
        """Not where the optimizer has 8 bits by its name."""
        smaller = OPTIMIZERS[config.training.optimizer].eight_bit not in ("", config.training.optimizer)
        return smaller and config.memory.optimizer_in_backward != "yes"

    @classmethod
    def of(cls, asked: Asked) -> Optimizer8bit | None:
        """Those that take the optimizer apart build it themselves."""
        memory = asked.config.memory
        apart = "yes" in (memory.optimizer_offload, memory.optimizer_in_backward)
        return cls() if cls.is_on(asked.config) and not apart else None

    def build(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        from ..optim.optimizers import build_optimizer, chosen

        name = chosen(settings.model_copy(update={"use_8bit_optimizer": "yes"})).name
        simulated = any(isinstance(parameter, FakeTensor) for group in groups for parameter in group["params"])
        if simulated:  # bitsandbytes would page real memory
            name = OPTIMIZERS[name].unpaged or name
        elif self.paged:
            name = PAGED.get(name, name)
        with unset_fake_temporarily():  # its code tables are worked out from values
            return build_optimizer(groups, settings.model_copy(update={"optimizer": name}))


TECHNIQUE = Optimizer8bit
