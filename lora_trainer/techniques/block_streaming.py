"""Keep the frozen base in host memory and bring its blocks to the card as they run (musubi-tuner's LoRA streaming, for
any model).

Weights travel one way; they come a second time for the backward pass, in which checkpointing runs each block again. Which
blocks stream is settled by bytes and spread evenly, so that the resident ones hide the copies of the others. Layers of a
streamed block are told their `home` before weights are read, so the card never holds the whole base. Adapters stay.

Left out: a staging buffer for memory that could not be page-locked, and convolutions or linears streamed one by one.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..engine.host import CPU, compute_device, host_buffer, is_fake, mapped_buffer
from ..engine.streaming import Master, Ring, Streamed, frozen_bytes, frozen_tensors
from ..seam.family import BlockGroup
from ..seam.technique import ConvertTechnique, WrapTechnique


@dataclass(frozen=True)
class BlockStreaming(ConvertTechnique, WrapTechnique):
    needs: ClassVar[tuple[str, ...]] = ("gradient_checkpointing",)
    order: ClassVar[int] = 15
    """After the quantisers, whose layers it marks; before checkpointing, inside which it must be."""

    fraction: float = 1.0
    """Of the blocks' bytes."""
    slots: int = 2
    """Device buffers: 1 holds least and overlaps nothing, 3 help where blocks are very uneven."""
    mapped: bool = False
    """The host master in a temporary file of `folder`, for machines short of RAM."""
    folder: str = "."

    def convert(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        for block in choose(_blocks(groups), self.fraction):
            for layer in block.modules():
                if any(tensor is not None for tensor in (*layer._parameters.values(), *layer._buffers.values())):
                    layer.home = CPU  # type: ignore[assignment]
                    if self.mapped:
                        layer.stow = functools.partial(_stow, layer, Path(self.folder))  # type: ignore[assignment]

    def wrap(self, model: nn.Module, groups: Sequence[BlockGroup]) -> None:
        blocks = _blocks(groups)
        chosen = [block for block in blocks if _has_home(block)] or choose(blocks, self.fraction)
        if not chosen:
            return
        device = compute_device(model, chosen)
        masters = [self._master(block, device) for block in chosen]
        ring = Ring(masters, device, self.slots)
        for index, block in enumerate(chosen):
            assert not hasattr(block.forward, "forward"), "streaming must come before whatever else wraps a block"
            block.forward = Streamed(block.forward, ring, index)

    def _master(self, block: nn.Module, device: torch.device) -> Master:
        for layer in block.modules():
            vars(layer).pop("stow", None)
        kept = (getattr(module, name) for module in block.modules() for name in getattr(module, "stays", ()))
        for tensor in (*(parameter for parameter in block.parameters() if parameter.requires_grad), *kept):
            if tensor.device != device:  # peft puts adapters where the base is
                tensor.data = tensor.data.to(device)
        return Master(block, functools.partial(self._buffer, device))

    def _buffer(self, device: torch.device, nbytes: int, like: Tensor) -> Tensor:
        if self.mapped:
            return mapped_buffer(nbytes, like, Path(self.folder))
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


def streamable_bytes(groups: Iterable[BlockGroup]) -> int:
    """What `fraction` is a fraction of."""
    return sum(frozen_bytes(block) for block in _blocks(groups))


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


def _blocks(groups: Iterable[BlockGroup]) -> list[nn.Module]:
    return [block for group in groups for block in group.blocks]


def _has_home(block: nn.Module) -> bool:
    return any(hasattr(layer, "home") for layer in block.modules())


@torch.no_grad()
def _stow(layer: nn.Module, folder: Path) -> None:
    """Move a layer's weights, just read, into files: RAM never holds the whole base."""
    for owner, name, tensor in list(frozen_tensors(layer)):
        if tensor.is_meta or is_fake(tensor):
            continue
        buffer = mapped_buffer(tensor.nbytes, tensor, folder)
        view = buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        owner[name] = nn.Parameter(view, requires_grad=False) if isinstance(tensor, nn.Parameter) else view


TECHNIQUE = BlockStreaming
