"""The engine of block streaming: a permanent host master for each block, and a ring of device buffers they pass through.

All frozen tensors of a block (parameters, packed bytes, quantisation state) lie in one flat buffer, so a block comes in with
one copy; nothing is ever copied back. The k-th streamed block always uses slot k mod n, so the module's tensors are views
of that slot made once: their address, device and dtype never change, only the bytes. They are plain tensors, not
Parameters: what autograd saves of them then shares the slot's version counter, and a slot overwritten before the backward
pass is done with it is an error, not a wrong gradient. Outside its own forward a block's tensors hold another block's bytes.

On CUDA the copies run on a stream of their own. When a block begins, all that earlier blocks wanted of their slots is queued
on the compute stream; an event recorded there is what the copies into other slots wait for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .host import is_fake
from .recompute import in_checkpoint, in_recomputation
from .tracker import count_transfer, own_tensors

ALIGNMENT = 256
"""Bytes; what kernels may assume of a tensor that an allocator returned, and more than any dtype needs."""

Moment = tuple[bool, int]
"""Whether in the backward pass, and which block."""


def frozen_tensors(block: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(dictionary that owns it, name, tensor) of everything in a block that is not trained, nor names itself in `stays`:
    what an adapter is measured from has to be read outside its block's turn too."""
    for module in block.modules():
        stays = getattr(module, "stays", ())
        for owner, name, tensor in own_tensors(module):
            if not tensor.requires_grad and tensor.numel() and name not in stays:
                yield owner, name, tensor


def frozen_bytes(block: nn.Module) -> int:
    """As streamed, alignment included."""
    sizes = {id(tensor): tensor.nbytes for _, _, tensor in frozen_tensors(block)}
    return sum(_aligned(size) for size in sizes.values())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Piece:
    owner: dict[str, Any]
    name: str
    start: int
    dtype: torch.dtype
    shape: torch.Size

    def view(self, buffer: Tensor) -> Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + nbytes].view(self.dtype).view(self.shape)


class Master:
    """The weights of one block in host memory."""

    def __init__(self, block: nn.Module, make_buffer: Callable[[int, Tensor], Tensor]) -> None:
        self._pieces: list[_Piece] = []
        starts: dict[int, int] = {}
        self.nbytes = 0
        for owner, name, tensor in frozen_tensors(block):
            assert type(tensor) in (Tensor, nn.Parameter, FakeTensor), f"{type(tensor)} cannot lie in a flat buffer"
            if id(tensor) not in starts:  # one tensor under two names stays one
                starts[id(tensor)] = self.nbytes
                self.nbytes += _aligned(tensor.nbytes)
            self._pieces.append(_Piece(owner, name, starts[id(tensor)], tensor.dtype, tensor.shape))
        self.buffer = make_buffer(self.nbytes, next(tensor for _, _, tensor in frozen_tensors(block)))
        if is_fake(self.buffer):  # no values to keep; a mixture has a hundred thousand of these tensors
            nowhere = torch.empty(0, device="meta")
            for piece in self._pieces:
                piece.owner[piece.name] = nowhere
            return
        for piece in self._pieces:
            piece.view(self.buffer).copy_(piece.owner[piece.name].detach())
        self.bind(self.buffer)

    def bind(self, buffer: Tensor) -> None:
        """Make the module's tensors views of this buffer."""
        views: dict[int, Tensor] = {}
        for piece in self._pieces:
            piece.owner[piece.name] = views.setdefault(piece.start, piece.view(buffer))


@dataclass
class _Slot:
    buffer: Tensor
    holds: int | None = None
    ready: Any = None
    """CUDA event: the copy is there."""


@dataclass
class Ring:
    """Device buffers for the masters, filled ahead of the order in which blocks were seen to run."""

    masters: Sequence[Master]
    device: torch.device
    num_slots: int
    loads: int = 0
    late: int = 0
    """Blocks that were not in their slot when they began, of all `loads`."""
    _slots: list[_Slot] = field(default_factory=list)
    _next: dict[Moment, Moment] = field(default_factory=dict)
    _last: Moment | None = None
    _stream: Any = None

    def __post_init__(self) -> None:
        like = self.masters[0].buffer
        self.num_slots = min(self.num_slots, len(self.masters))
        for first in range(self.num_slots):
            sizes = [master.nbytes for master in self.masters[first :: self.num_slots]]
            self._slots.append(_Slot(like.new_empty(max(sizes), dtype=torch.uint8, device=self.device)))
        for index, master in enumerate(self.masters):
            master.bind(self._slot(index).buffer)
        if self.device.type == "cuda" and not is_fake(like):
            self._stream = torch.cuda.Stream(self.device)

    @property
    def buffers(self) -> list[Tensor]:
        return [slot.buffer for slot in self._slots]

    def begin(self, index: int, backward: bool) -> None:
        """Bring a block's weights in, and start on those of the blocks that came after it last time."""
        now = (backward, index)
        if self._last is not None:
            self._next[self._last] = now
        self._last = now
        free = torch.cuda.current_stream(self.device).record_event() if self._stream else None
        self.late += self._load(index, free)
        if free is not None:
            torch.cuda.current_stream(self.device).wait_event(self._slot(index).ready)
        for ahead in self._ahead(now):
            self._load(ahead, free)

    def _slot(self, index: int) -> _Slot:
        return self._slots[index % self.num_slots]

    def _load(self, index: int, free: Any) -> bool:
        slot, master = self._slot(index), self.masters[index]
        if slot.holds == index:
            return False
        slot.holds = None
        with torch.no_grad(), self._beside_computation(free):
            slot.buffer[: master.nbytes].copy_(master.buffer, non_blocking=True)
            if self._stream:
                slot.ready = self._stream.record_event()
        slot.holds = index
        self.loads += 1
        count_transfer(master.nbytes)
        return True

    def _beside_computation(self, free: Any) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(free)
        return torch.cuda.stream(self._stream)

    def _ahead(self, now: Moment) -> list[int]:
        """The blocks to come, as far as there is a slot for each besides the one in use."""
        taken, moment = {now[1] % self.num_slots: now[1]}, self._next.get(now)
        for _ in range(2 * self.num_slots):
            if moment is None or len(taken) == self.num_slots:
                break
            index = moment[1]
            if taken.setdefault(index % self.num_slots, index) != index:
                break
            moment = self._next.get(moment)
        return list(taken.values())[1:]


class Streamed:
    """Stands in for a block's `forward`: weights first."""

    def __init__(self, forward: Callable[..., Any], ring: Ring, index: int) -> None:
        self.forward, self.ring, self.index = forward, ring, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = torch.is_grad_enabled() and not in_checkpoint()
        assert not kept, "a streamed block needs gradient checkpointing: its weights are gone before the backward pass"
        self.ring.begin(self.index, backward=in_recomputation())
        return self.forward(*args, **kwargs)
