"""One tensor into one layer, wherever the layer lives and however it keeps its weight."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .tracker import host_memory


def assign(module: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Give a parameter or buffer on meta its value: in the layer's `home` if it has one, packed if the layer packs."""
    path, _, leaf = name.rpartition(".")
    owner: Any = module.get_submodule(path)
    away, home = hasattr(owner, "home"), getattr(owner, "home", device)
    if leaf == "weight" and hasattr(owner, "pack_weight"):
        owner.pack_weight(tensor.to(device=device, dtype=dtype), home)
    else:
        old = getattr(owner, leaf)
        assert old.is_meta, f"{name} filled twice"
        with host_memory() if away or home != device else nullcontext():
            # A part of a fused tensor would keep the whole alive.
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            tensor = tensor.to(device=home, dtype=dtype, copy=not whole).reshape(old.shape).contiguous()
        if isinstance(old, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)
    if hasattr(owner, "stow"):
        owner.stow()
