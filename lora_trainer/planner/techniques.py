"""From a config to the techniques it asks for. Where an option is still `auto`, the plan has not spoken: the usual holds."""

from pathlib import Path

import torch

from ..config.schema import Config
from ..errors import ConfigError, t
from ..machine.hardware import Precision
from ..optim.per_parameter import not_separable
from ..seam.technique import Technique
from ..techniques import MemoryPlan
from ..techniques.activation_offload import ActivationOffload
from ..techniques.block_streaming import BlockStreaming
from ..techniques.cast_fp8 import CastFp8
from ..techniques.embedding_offload import EmbeddingOffload
from ..techniques.gradient_checkpointing import GradientCheckpointing
from ..techniques.mixed_precision import MixedPrecision
from ..techniques.optimizer_8bit import Optimizer8bit
from ..techniques.optimizer_in_backward import OptimizerInBackward
from ..techniques.optimizer_offload import OptimizerOffload
from ..techniques.quantize_4bit import Quantize4bit
from ..techniques.quantize_8bit import Quantize8bit

QUANTIZERS: dict[str, tuple[type[Technique], ...]] = {
    "nf4": (Quantize4bit, Quantize8bit),
    "int8": (Quantize8bit,),
    "fp8": (CastFp8,),
}
"""nf4 leaves what 4 bits cannot hold (convolutions, odd widths) to int8, which costs no measurable accuracy."""


def make_plan(config: Config, precision: Precision, device: torch.device, folder: Path) -> MemoryPlan:
    """`folder`: where a mapped host master would lie. Raises ConfigError for options that cannot go together."""
    training, memory = config.training, config.memory
    techniques: list[Technique] = []
    techniques += [technique() for technique in QUANTIZERS.get(memory.base_quantization, ())]
    if memory.embedding_offload == "yes":
        techniques.append(EmbeddingOffload())
    if isinstance(memory.block_streaming, float):
        mapped = memory.mapped_master == "yes"
        techniques.append(BlockStreaming(fraction=memory.block_streaming, mapped=mapped, folder=str(folder)))
    if training.gradient_checkpointing != "no":
        techniques.append(GradientCheckpointing())
    if memory.activation_offload == "yes":
        techniques.append(ActivationOffload())
    if precision.compute != torch.float32:
        techniques.append(MixedPrecision("bf16" if precision.compute is torch.bfloat16 else "fp16", device.type))
    if memory.optimizer_in_backward == "yes":
        in_backward = OptimizerInBackward()
        if reason := in_backward.conflicts(training, precision):
            raise ConfigError(
                t(
                    pt=f"memoria.otimizador_no_backward não anda junto com: {reason}",
                    en=f"memory.optimizer_in_backward does not go with: {reason}",
                ),
                t(pt="mude um dos dois", en="change one of the two"),
            )
        techniques.append(in_backward)
    elif memory.optimizer_offload == "yes":
        if reason := not_separable(training):
            raise ConfigError(
                t(
                    pt=f"memoria.descarga_otimizador não anda junto com: {reason}",
                    en=f"memory.optimizer_offload does not go with: {reason}",
                ),
                t(pt="mude um dos dois", en="change one of the two"),
            )
        techniques.append(OptimizerOffload(Optimizer8bit() if training.use_8bit_optimizer == "yes" else None))
    elif training.use_8bit_optimizer == "yes":
        techniques.append(Optimizer8bit())
    return MemoryPlan(tuple(techniques))
