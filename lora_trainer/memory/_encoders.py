"""Text encoders of the caching phase, packed while they load: a T5 of 9 GiB has no place on a small card.

An encoder's repeated layers are its outermost module lists, whatever its architecture; embeddings, norms and projections
stay as they are.
"""

from collections.abc import Iterator

from torch import nn

from ..families._base import BlockGroup
from ._base import ConvertTechnique


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
