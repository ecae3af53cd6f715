"""A frozen low-rank branch beside a layer, which can be taken off for a while: what a training LoRA is worn as.

The base itself is not touched, so it may be packed, streamed or both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BRANCH = "training_branch"
"""The attribute of a layer that holds its branch."""
_META = torch.device("meta")


class Branch(nn.Module):
    """`up @ down` of one layer, the scale folded in; buffers, so that block streaming takes them along with the layer."""

    down: Tensor
    up: Tensor

    def __init__(self, down: Tensor, up: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for name, value in (("down", down), ("up", up)):
            stored = torch.empty(value.shape, dtype=dtype, device=device) if device == _META else value.to(device, dtype)
            self.register_buffer(name, stored, persistent=False)
        self.active = True

    def added(self, layer: nn.Module, input: Tensor, output: Tensor) -> Tensor:
        if isinstance(layer, nn.Conv2d):
            inner = F.conv2d(input, self.down, None, layer.stride, layer.padding, layer.dilation)
            return output + F.conv2d(inner, self.up)
        inner = F.linear(input, self.down).flatten(0, -2)
        return torch.addmm(output.flatten(0, -2), inner, self.up.T).view(output.shape)  # one temporary, not two


def add_branch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    branch: Branch = getattr(layer, BRANCH)
    return branch.added(layer, inputs[0], output) if branch.active else output


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """Inside, the base answers as its files do."""
    branches = [module for module in model.modules() if isinstance(module, Branch)]
    for branch in branches:
        branch.active = False
    try:
        yield
    finally:
        for branch in branches:
            branch.active = True
