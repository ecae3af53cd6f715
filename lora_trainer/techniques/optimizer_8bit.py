"""Keep the optimizer's moments in 8 bits (Dettmers et al. 2022): 2 bytes per trained weight instead of 8.

Tensors below 4096 elements keep float32 moments. Paged, those above 100,000 elements lie in memory that the driver moves
to the host when the card is full; LoRA matrices are seldom that large, so paging helps with high ranks only. A simulation
counts paged moments as if they stayed on the card.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..choices.optimizers import OPTIMIZERS
from ..config.schema import TrainingConfig
from ..optim.optimizers import build_optimizer, chosen
from ..seam.technique import Groups, OptimizerTechnique

PAGED = {row.unpaged: row.name for row in OPTIMIZERS.values() if row.unpaged}


@dataclass(frozen=True)
class Optimizer8bit(OptimizerTechnique):
    lossless: ClassVar[bool] = False

    paged: bool = False

    def build(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
        name = chosen(settings.model_copy(update={"use_8bit_optimizer": "yes"})).name
        simulated = any(isinstance(parameter, FakeTensor) for group in groups for parameter in group["params"])
        if simulated:  # bitsandbytes would page real memory
            name = OPTIMIZERS[name].unpaged or name
        elif self.paged:
            name = PAGED.get(name, name)
        with unset_fake_temporarily():  # its code tables are worked out from values
            return build_optimizer(groups, settings.model_copy(update={"optimizer": name}))


TECHNIQUE = Optimizer8bit
