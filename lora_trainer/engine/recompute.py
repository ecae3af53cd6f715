"""A checkpoint that other memory techniques can act on: a block's inputs are saved through autograd, the rest is remade.

Like torch's non-reentrant checkpoint the block stays part of the one graph, so every gradient is summed in the same order
and nothing changes, not even in 16 bits. Ours differs in three ways. Its inputs are kept where saved-tensor hooks see them
(activation offload); torch keeps Python references. The block runs again before the first node of its backward pass,
whether or not that node saved anything, because libraries keep packed weights outside autograd's sight (block streaming
must have brought them in by then). What is remade keeps its version, so that a weight overwritten too early is an error.

Left out: tensors hidden in objects that pytree does not open, and a second backward pass over one graph.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from .tracker import host_memory

_first_runs = _second_runs = 0
"""How many are under way, one inside the other."""


def in_recomputation() -> bool:
    """Whether a block is being run again for its backward pass."""
    return _second_runs > 0


def in_checkpoint() -> bool:
    """Whether nothing of what runs now is kept for the backward pass."""
    return _first_runs + _second_runs > 0


def recompute(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), of which only the tensors among the arguments are kept for the backward pass."""
    global _first_runs
    frame = _Frame(function, args, kwargs)
    _first_runs += 1
    try:
        with saved_tensors_hooks(frame.pack, frame.unpack):
            result = function(*args, **kwargs)
    finally:
        _first_runs -= 1
    for output in tree_leaves(result):
        if isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(frame.begin)
    return result


class _Saver(torch.autograd.Function):
    """Holds tensors as autograd does: with version checks, and through whatever hooks are in force."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("only holds tensors")


class _Remade:
    """Stands in the graph for a tensor that the block's second run brings back."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None
        self.version = 0

    def fill(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def take(self) -> Tensor:
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "a block's backward pass ran twice, or its second run was not like the first"
        if tensor._version != self.version:
            raise RuntimeError(
                f"a tensor {tuple(tensor.shape)} needed by a block's backward pass was overwritten after the block "
                f"ran again (version {tensor._version}, expected {self.version})"
            )
        return tensor


class _Done(Exception):
    """Raised out of the second run when all that the backward pass needs is there."""


class _Frame:
    """One call of a block: its arguments, its surroundings (random state, autocast) and what its graph waits for."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._needs_grad = [tensor.requires_grad for tensor in tensors]
        self._function = function
        self._waiting: list[weakref.ref[_Remade]] = []
        with host_memory():
            anchor = torch.empty(0, requires_grad=True)
        self._saver: Tensor | None = _Saver.apply(anchor, *tensors)
        self._random = None if any(isinstance(x, FakeTensor) for x in [anchor, *tensors]) else _RandomState(tensors)
        kinds = sorted({tensor.device.type for tensor in tensors} | {"cpu"})
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]

    def pack(self, _: Tensor) -> _Remade:
        holder = _Remade()
        self._waiting.append(weakref.ref(holder))
        return holder

    def unpack(self, holder: _Remade) -> Tensor:
        self.begin()
        return holder.take()

    def begin(self, *_: Any) -> None:
        """Run the block again, once, up to the last tensor its graph waits for."""
        if self._saver is None:
            return
        assert self._saver.grad_fn is not None
        saved = self._saver.grad_fn.saved_tensors  # type: ignore[attr-defined]
        self._saver = None
        leaves = list(self._others)
        for place, tensor, need in zip(self._places, saved, self._needs_grad, strict=True):
            leaves[place] = tensor.detach().requires_grad_(need)
        del saved
        args, kwargs = tree_unflatten(leaves, self._spec)
        del leaves
        waiting = iter(self._waiting)
        left = len(self._waiting)

        def fill_next(tensor: Tensor) -> None:
            nonlocal left
            assert left, "the second run of a block saved more than the first"
            left -= 1
            if (holder := next(waiting)()) is not None:
                holder.fill(tensor)
            if not left:
                raise _Done

        with self._surroundings(), saved_tensors_hooks(fill_next, _never), suppress(_Done):
            self._function(*args, **kwargs)
        assert not left, "the second run of a block saved less than the first"

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        global _second_runs
        _second_runs += 1
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                if self._random is not None:
                    stack.enter_context(self._random.restored())
                for kind, enabled, dtype in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                yield
        finally:
            _second_runs -= 1


class _RandomState:
    """Of the CPU and of the devices where some tensors are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        with host_memory():
            self.cpu = torch.get_rng_state()
            self.devices, self.states = get_device_states(*tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with host_memory(), torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            with host_memory(False):
                yield


def _never(_: Any) -> Tensor:
    raise AssertionError("the graph of a second run is never walked")


class Recomputed:
    """Stands in for a block's `forward`, and counts: a checkpoint that is silently off looks just like one on."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.passes = 0
        """Forward passes with gradients."""
        self.runs = 0
        """Times the block really ran for them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        self.passes += 1
        return recompute(self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.forward(*args, **kwargs)
