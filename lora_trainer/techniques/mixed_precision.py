"""Compute in 16 bits while the trained weights stay in float32.

Autocast casts the small float32 matrices of the adapter, not the activations: peft would cast each input up to float32
and keep that copy for the backward pass. fp16 needs a loss scale on top; bf16 has float32's range. `training.mixed_precision`
asks for it, and the card has a word in it (machine/hardware.py): it is no option of this file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..seam.technique import Asked, Blocks, ContextTechnique, Module, ScalerTechnique, WrapTechnique

if TYPE_CHECKING:
    import torch

HALVES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class MixedPrecision(WrapTechnique, ContextTechnique, ScalerTechnique):
    order = 60
    lossless = False

    dtype: str = "bf16"
    """Of HALVES."""
    device: str = "cuda"
    """Device type, "cuda" or "cpu"."""

    @classmethod
    def of(cls, asked: Asked) -> MixedPrecision | None:
        return cls(asked.compute, asked.device) if asked.compute in HALVES else None

    def wrap(self, model: Module, groups: Blocks) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.register_forward_pre_hook(_keep_input_dtype)

    def context(self) -> AbstractContextManager[object]:
        import torch

        return torch.autocast(self.device, dtype=getattr(torch, HALVES[self.dtype]))

    def scaler(self) -> torch.amp.GradScaler:
        import torch

        return torch.amp.GradScaler(self.device, enabled=self.dtype == "fp16")


def _keep_input_dtype(layer: Any, args: tuple[Any, ...]) -> None:
    """Asked at each call: outside autocast (a check after saving, say) the layer only works with peft's cast."""
    import torch

    layer.cast_input_dtype_enabled = not torch.is_autocast_enabled(args[0].device.type)


TECHNIQUE = MixedPrecision
