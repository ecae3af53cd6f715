"""Keep the optimizer's moments in 8 bits (Dettmers et al. 2022): 2 bytes per trained weight instead of 8.

Tensors below 4096 elements keep float32 moments. Paged, the moments may move to host memory when the card is full.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..config.schema import TrainingConfig
from ..optimizers import Groups, build_optimizer, resolve_name
from ._base import OptimizerTechnique


@dataclass(frozen=True)
class Optimizer8bit(OptimizerTechnique):
    lossless: ClassVar[bool] = False

    paged: bool = False

    def build(self, groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
        name = resolve_name(settings.model_copy(update={"use_8bit_optimizer": "yes"}))
        if self.paged and name == "adamw8bit":
            name = "pagedadamw8bit"
        return build_optimizer(groups, settings.model_copy(update={"optimizer": name}))


TECHNIQUE = Optimizer8bit
