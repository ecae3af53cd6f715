"""Blocks of a frozen base in host memory: which of them stream, how they are laid out, and how it went. The machinery is
streaming.py's; the technique that asks for it techniques/block_streaming.py's."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..seam.family import BlockGroup
from .host import CPU, compute_device, host_buffer, is_fake, mapped_buffer
from .streaming import Master, Ring, Streamed, frozen_bytes, frozen_tensors
from .tracker import own_tensors


def send_home(groups: Sequence[BlockGroup], fraction: float, folder: Path | None) -> None:
    """Tell the layers of streamed blocks, on meta, that their weights are to be read into host memory: into mapped files of
    `folder`, if one is given."""
    for block in choose(blocks_of(groups), fraction):
        for layer in block.modules():
            if list(own_tensors(layer)):
                layer.home = CPU  # type: ignore[assignment]
                if folder is not None:
                    layer.stow = functools.partial(_stow, layer, folder)  # type: ignore[assignment]


def stream(
    model: nn.Module, groups: Sequence[BlockGroup], fraction: float, slots: int, folder: Path | None
) -> None:
    """Lay the weights of the blocks that were sent home (else of a `fraction` of them) into masters, and bring each to the
    card, through a ring of `slots` buffers, when its block runs."""
    blocks = blocks_of(groups)
    chosen = [block for block in blocks if _has_home(block)] or choose(blocks, fraction)
    if not chosen:
        return
    device = compute_device(model, chosen)
    masters = [_master(block, device, folder) for block in chosen]
    ring = Ring(masters, device, slots)
    for index, block in enumerate(chosen):
        assert not hasattr(block.forward, "forward"), "streaming must come before whatever else wraps a block"
        block.forward = Streamed(block.forward, ring, index)


def _master(block: nn.Module, device: torch.device, folder: Path | None) -> Master:
    for layer in block.modules():
        vars(layer).pop("stow", None)
    kept = (getattr(module, name) for module in block.modules() for name in getattr(module, "stays", ()))
    for tensor in (*(parameter for parameter in block.parameters() if parameter.requires_grad), *kept):
        if tensor.device != device:  # peft puts adapters where the base is
            tensor.data = tensor.data.to(device)
    return Master(block, functools.partial(_buffer, device, folder))


def _buffer(device: torch.device, folder: Path | None, nbytes: int, like: Tensor) -> Tensor:
    if folder is not None:
        return mapped_buffer(nbytes, like, folder)
    return host_buffer(nbytes, like, locked=device.type == "cuda" and not is_fake(like))


def choose(blocks: Sequence[nn.Module], fraction: float) -> list[nn.Module]:
    """Blocks holding about `fraction` of the bytes, evenly spaced: each is taken if that brings the share closer."""
    chosen, streamed, passed = [], 0, 0
    for block in blocks:
        size = frozen_bytes(block)
        passed += size
        if size and streamed + size / 2 <= fraction * passed:
            chosen.append(block)
            streamed += size
    return chosen


@dataclass(frozen=True)
class StreamingReport:
    """Bytes in host memory and in the ring; copies so far, and how many of them their block had to wait for."""

    blocks: int
    host_bytes: int
    ring_bytes: int
    loads: int
    late: int


def streaming_report(model: nn.Module) -> StreamingReport | None:
    """None where nothing streams."""
    ring = _ring(model)
    if ring is None:
        return None
    host = sum(master.nbytes for master in ring.masters)
    return StreamingReport(len(ring.masters), host, sum(b.nbytes for b in ring.buffers), ring.loads, ring.late)


def ring_buffers(model: nn.Module) -> list[Tensor]:
    """The device buffers that frozen weights pass through."""
    ring = _ring(model)
    return ring.buffers if ring is not None else []


def _ring(model: nn.Module) -> Ring | None:
    for module in model.modules():
        forward = module.forward
        while hasattr(forward, "forward"):
            if isinstance(forward, Streamed):
                return forward.ring
            forward = forward.forward
    return None


def blocks_of(groups: Iterable[BlockGroup]) -> list[nn.Module]:
    return [block for group in groups for block in group.blocks]


def _has_home(block: nn.Module) -> bool:
    return any(hasattr(layer, "home") for layer in block.modules())


@torch.no_grad()
def _stow(layer: nn.Module, folder: Path) -> None:
    """Move a layer's weights, just read, into files: RAM never holds the whole base."""
    for owner, name, tensor in frozen_tensors(layer):
        if tensor.is_meta or is_fake(tensor):
            continue
        buffer = mapped_buffer(tensor.nbytes, tensor, folder)
        view = buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        owner[name] = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view
