"""What autograd saves for the backward pass, kept in host memory meanwhile (techniques/activation_offload.py).

Saved-tensor hooks copy each large tensor out as autograd saves it and back when the backward pass asks; the one needed next
is fetched while the present one is in use. Host buffers are kept for the next step. Weights stay: the base's are either
resident or streamed, the adapter's are small. On CUDA the copies run on a stream of their own. Left out: 8-bit copies.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .host import host_buffer, is_fake
from .tracker import count_transfer, host_memory

MAX_WASTE = 2
"""A free host buffer up to this many times too large is taken rather than a new one made."""


class Pool:
    """Host buffers between uses, and the CUDA stream that all copies are queued on.

    A buffer may be handed on while a copy from it is still queued: the next copy into it comes after, on the same stream.
    """

    def __init__(self) -> None:
        self.start([])
        self._streams: dict[torch.device, Any] = {}

    def start(self, weights: Iterable[Tensor]) -> None:
        """For a model: its weights are known by their storages, and buffers of another (fake, perhaps) are forgotten."""
        self.free: list[Tensor] = []
        self.weights = {tensor.untyped_storage()._cdata for tensor in weights}

    def take(self, nbytes: int, like: Tensor) -> Tensor:
        fitting = [
            (buffer.nbytes, place)
            for place, buffer in enumerate(self.free)
            if nbytes <= buffer.nbytes <= MAX_WASTE * nbytes
        ]
        if not fitting:
            return host_buffer(nbytes, like, locked=self.stream(like) is not None)
        return self.free.pop(min(fitting)[1])

    def stream(self, like: Tensor) -> Any:
        if like.device.type != "cuda" or is_fake(like):
            return None
        if like.device not in self._streams:
            self._streams[like.device] = torch.cuda.Stream(like.device)
        return self._streams[like.device]


class _Offloaded:
    """A saved tensor in host memory. `before` was saved just before it, so is wanted just after it."""

    def __init__(self, tensor: Tensor, pool: Pool, before: "_Offloaded | None") -> None:
        self.pool, self.device, self.nbytes = pool, tensor.device, tensor.nbytes
        self.buffer = pool.take(self.nbytes, tensor)
        weakref.finalize(self, pool.free.append, self.buffer).atexit = False
        as_pixels = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        self.channels_last = as_pixels and not tensor.is_contiguous()
        tensor = tensor.permute(0, 2, 3, 1) if self.channels_last else tensor.contiguous()
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stream = pool.stream(tensor)
        self.before = weakref.ref(before) if before is not None else None
        self.fetched: Tensor | None = None
        self._given: weakref.ref[Tensor] | None = None
        self._ready: Any = None
        self._copy(self._host(), tensor, on_device=tensor)

    def fetch(self) -> Tensor:
        """Begin to bring the tensor back, unless that is under way or it is still there."""
        back = self.fetched if self.fetched is not None else self._given() if self._given is not None else None
        if back is None:
            back = self.buffer.new_empty(self.shape, dtype=self.dtype, device=self.device)
            self._copy(back, self._host(), on_device=back)
            if self.stream:
                self._ready = self.stream.record_event()
        self.fetched = back
        return back

    def restore(self) -> Tensor:
        """The tensor; asks for the one before it as well."""
        back = self.fetch()
        self.fetched, self._given = None, weakref.ref(back)
        if self._ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
        if self.before is not None and (before := self.before()) is not None:
            before.fetch()
        return back.permute(0, 3, 1, 2) if self.channels_last else back

    def _host(self) -> Tensor:
        with host_memory():
            return self.buffer[: self.nbytes].view(self.dtype).view(self.shape)

    def _copy(self, to: Tensor, source: Tensor, *, on_device: Tensor) -> None:
        beside: AbstractContextManager[Any] = nullcontext()
        if self.stream:
            on_device.record_stream(self.stream)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            beside = torch.cuda.stream(self.stream)
        with torch.no_grad(), beside:
            to.copy_(source, non_blocking=True)
        count_transfer(self.nbytes)


class Offloading(saved_tensors_hooks):
    """Of one forward pass: knows what it has offloaded already, since several nodes may save one tensor."""

    def __init__(self, pool: Pool, min_bytes: int) -> None:
        super().__init__(self._pack, self._unpack)
        self._pool, self._min_bytes = pool, min_bytes
        self._last: weakref.ref[_Offloaded] | None = None
        self._known: dict[Any, tuple[Any, weakref.ref[_Offloaded]]] = {}

    def _pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        storage = tensor.untyped_storage()
        is_weight = isinstance(tensor, nn.Parameter) or storage._cdata in self._pool.weights
        if is_weight or not self._min_bytes <= tensor.nbytes <= storage.nbytes():  # nor what is only expanded
            return tensor if tensor.is_leaf else tensor.detach()  # itself would keep alive the graph that saves it
        layout = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        alive, known = self._known.get(layout, (lambda: None, lambda: None))
        handle = known() if alive() is not None else None
        if handle is None:
            handle = _Offloaded(tensor.detach(), self._pool, self._last() if self._last is not None else None)
            self._last = weakref.ref(handle)
            self._known[layout] = (weakref.ref(storage), self._last)
        return handle

    @staticmethod
    def _unpack(packed: Tensor | _Offloaded) -> Tensor:
        return packed.restore() if isinstance(packed, _Offloaded) else packed
