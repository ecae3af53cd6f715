"""Text encoders of the caching phase, packed or streamed while they load: a T5 of 9 GiB has no place on a small card.

An encoder's repeated layers are its outermost module lists, whatever its architecture; embeddings, norms and projections
stay as they are.
"""

from collections.abc import Iterator

import torch
from torch import nn

from ..seam.family import BlockGroup, ImageFamily
from ..seam.technique import ConvertTechnique
from ..techniques import packing
from ..techniques.block_streaming import BlockStreaming


def load_encoders(
    family: ImageFamily, device: torch.device, dtype: torch.dtype, *, quantization: str = "no", streaming: bool = False
) -> nn.ModuleDict:
    """A family's text encoders for passes without gradients. Streaming changes no number, quantisation does.

    On "meta" the streamed ones still want `stream_encoders`, once their tensors are fake.
    """
    techniques: list[ConvertTechnique] = [technique() for technique in packing(quantization)]
    techniques += [BlockStreaming()] if streaming else []

    def prepare(encoders: nn.ModuleDict) -> None:
        for technique in techniques:
            convert_encoders(encoders, technique)

    encoders = family.load_text_encoders(device, dtype, prepare if techniques else None)
    if streaming and device.type != "meta":
        stream_encoders(encoders)
    return encoders


def stream_encoders(encoders: nn.ModuleDict) -> None:
    """Lay the layers of loaded encoders into host memory, from where they come to the device one by one."""
    BlockStreaming().wrap(encoders, encoder_groups(encoders))


def encoder_groups(encoders: nn.ModuleDict) -> list[BlockGroup]:
    """One group for each run of repeated layers, named after its encoder."""
    return [BlockGroup(name, list(run)) for name, encoder in encoders.items() for run in _outermost_lists(encoder)]


def convert_encoders(encoders: nn.ModuleDict, technique: ConvertTechnique) -> None:
    """Act on encoders on meta, before their weights are read: the `prepare` of families' load_text_encoders."""
    technique.convert(encoders, encoder_groups(encoders))


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)
