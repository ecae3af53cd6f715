"""Text encoders of the caching phase, packed or streamed while they load: a T5 of 9 GiB has no place on a small card.

An encoder's repeated layers are its outermost module lists, whatever its architecture; embeddings, norms and projections
stay as they are.
"""

from collections.abc import Iterator

import torch
from torch import nn

from ..seam.family import BlockGroup, ImageFamily
from ..techniques import MemoryPlan, packing
from ..techniques.block_streaming import BlockStreaming


def load_encoders(
    family: ImageFamily, device: torch.device, dtype: torch.dtype, *, quantization: str = "no", streaming: bool = False
) -> nn.ModuleDict:
    """A family's text encoders for passes without gradients. Streaming changes no number, quantisation does.

    On "meta" the streamed ones still want `stream_encoders`, once their tensors are fake.
    """
    plan = MemoryPlan((*(technique() for technique in packing(quantization)), *([BlockStreaming()] if streaming else [])))
    encoders = family.load_text_encoders(device, dtype, lambda found: plan.convert(found, encoder_groups(found)))
    if streaming and device.type != "meta":
        stream_encoders(encoders)
    return encoders


def stream_encoders(encoders: nn.ModuleDict) -> None:
    """Lay the layers of loaded encoders into host memory, from where they come to the device one by one."""
    BlockStreaming().wrap(encoders, encoder_groups(encoders))


def encoder_groups(encoders: nn.ModuleDict) -> list[BlockGroup]:
    """One group for each run of repeated layers, named after its encoder."""
    return [BlockGroup(name, list(run)) for name, encoder in encoders.items() for run in _outermost_lists(encoder)]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)
