"""Compute in 16 bits while the trained weights stay in float32.

Autocast casts the small float32 matrices of the adapter, not the activations: peft would cast each input up to float32
and keep that copy for the backward pass. fp16 needs a loss scale on top; bf16 has float32's range.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ..seam.family import BlockGroup
from ..seam.technique import ContextTechnique, ScalerTechnique, WrapTechnique

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MixedPrecision(WrapTechnique, ContextTechnique, ScalerTechnique):
    order: ClassVar[int] = 60
    lossless: ClassVar[bool] = False

    dtype: Literal["fp16", "bf16"] = "bf16"
    device: str = "cuda"
    """Device type, "cuda" or "cpu"."""

    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.register_forward_pre_hook(_keep_input_dtype)

    def context(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype=DTYPES[self.dtype])

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device, enabled=self.dtype == "fp16")


def _keep_input_dtype(layer: Any, args: tuple[Any, ...]) -> None:
    """Asked at each call: outside autocast (a check after saving, say) the layer only works with peft's cast."""
    layer.cast_input_dtype_enabled = not torch.is_autocast_enabled(args[0].device.type)


TECHNIQUE = MixedPrecision
