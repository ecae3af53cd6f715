"""What tests count of a model: weights by their format, bytes that could be streamed, blocks that ran again."""

from collections.abc import Iterable

from torch import nn

from lora_trainer.engine.block_streaming import blocks_of
from lora_trainer.engine.recompute import Recomputed
from lora_trainer.engine.streaming import frozen_bytes
from lora_trainer.seam.family import BlockGroup


def packed_weights(model: nn.Module) -> dict[str, int]:
    """Format ("nf4", "int8", …) -> weights held in it."""
    counts: dict[str, int] = {}
    for layer in model.modules():
        if hasattr(layer, "packing"):
            counts[layer.packing.title] = counts.get(layer.packing.title, 0) + layer.weight_shape.numel()
    return counts


def streamable_bytes(groups: Iterable[BlockGroup]) -> int:
    """What a share of streamed blocks is a share of."""
    return sum(frozen_bytes(block) for block in blocks_of(groups))


def recomputations(model: nn.Module) -> int:
    """How often blocks ran again for a backward pass since they were wrapped; 0 after a step means it is off."""
    wrapped = [module.forward for module in model.modules() if isinstance(module.forward, Recomputed)]
    return sum(each.runs - each.passes for each in wrapped)
