"""Layers as wide as the vocabulary, and how they work from host memory (techniques/embedding_offload.py).

A token looks its row up in host memory and only the row crosses over. The head is needed for the loss alone, whose code
(families/causal_lm/loss.py) brings it in some thousand rows at a time.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..seam.family import BlockGroup
from .host import CPU, compute_device, host_buffer, is_fake
from .tracker import count_transfer, host_memory, own_tensors


class AtHome:
    """Stands in for an embedding's `forward`: runs where its weight is, and sends the result."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward

    def __call__(self, ids: Tensor) -> Tensor:
        with host_memory():
            rows = self.forward(ids.to(CPU))
        count_transfer(rows.nbytes)
        return rows.to(ids.device, copy=True)


class BroughtIn:
    """Stands in for a linear layer's `forward`: its weight comes to the input, whole."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        count_transfer(weight.nbytes)
        return F.linear(x, weight.to(x.device, copy=True), None if bias is None else bias.to(x.device))


def send_home(model: nn.Module, groups: Sequence[BlockGroup]) -> None:
    """Tell them, on meta, that their weights are to be read into host memory."""
    for layer in _vocabulary_layers(model, groups):
        if list(own_tensors(layer)):  # a tied head follows its embeddings
            layer.home = CPU  # type: ignore[assignment]


def work_from_home(model: nn.Module, groups: Sequence[BlockGroup]) -> None:
    away = {layer for layer in _vocabulary_layers(model, groups) if hasattr(layer, "home")}
    card = compute_device(model)
    for layer in model.modules():
        if getattr(layer, "base_layer", None) in away:  # peft puts adapters where the base is
            for parameter in layer.parameters():
                parameter.data = parameter.data.to(card) if parameter.requires_grad else parameter.data
    for layer in away:
        _lock(layer, card)
        stand_in = BroughtIn(layer) if isinstance(layer, nn.Linear) else AtHome(layer.forward)
        layer.forward = stand_in


def vocabulary_bytes(model: nn.Module, groups: Sequence[BlockGroup]) -> list[int]:
    """What would leave the card, layer by layer."""
    sizes = (sum(tensor.nbytes for _, _, tensor in own_tensors(layer)) for layer in _vocabulary_layers(model, groups))
    return [size for size in sizes if size]


def _vocabulary_layers(model: nn.Module, groups: Sequence[BlockGroup]) -> Iterator[nn.Module]:
    """Embeddings, and linear layers with an output for each of their rows; peft's own layers are not among them."""
    inside = {id(layer) for group in groups for block in group.blocks for layer in block.modules()}
    outside = [layer for layer in model.modules() if id(layer) not in inside]
    rows = {layer.num_embeddings for layer in outside if isinstance(layer, nn.Embedding)}
    for layer in outside:
        if isinstance(layer, nn.Embedding) or (isinstance(layer, nn.Linear) and layer.out_features in rows):
            yield layer


@torch.no_grad()
def _lock(layer: nn.Module, card: torch.device) -> None:
    """Pages that do not move, so that copies run beside computation."""
    for owner, name, tensor in own_tensors(layer):
        if card.type != "cuda" or is_fake(tensor):
            continue
        view = host_buffer(tensor.nbytes, tensor, locked=True).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        owner[name] = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
