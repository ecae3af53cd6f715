"""Live tensor bytes of a run, real or fake alike: by phase, and by cause at each phase's peak.

A dispatch mode sees every storage an operator returns and when it is freed; sizes are rounded to 512 bytes as the CUDA
caching allocator does. Causes that are only known later (gradients, optimizer state, what autograd kept for the backward
pass) are told afterwards, so the breakdown is worked out from the recorded lives at the end. Storages made within
`host_memory()` count as host RAM; so does whatever is on the CPU while a card computes. With a `limit`, going over it
raises torch.OutOfMemoryError, as a smaller card would.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

ROUNDING = 512
CAUSES = ("frozen", "adapter", "gradients", "optimizer", "activations", "temporary")
_DEVICE = torch.ops.prim.device.default
_making_host_memory = False
_active: "MemoryTracker | None" = None


@contextmanager
def host_memory(on: bool = True) -> Iterator[None]:
    """Tensors made within are host RAM (streaming masters, offloaded activations), also when the device is the CPU."""
    global _making_host_memory
    before, _making_host_memory = _making_host_memory, on
    try:
        yield
    finally:
        _making_host_memory = before


def count_transfer(count: int) -> None:
    """Tell the tracker, if one is watching, of bytes copied between host and device."""
    if _active is not None:
        _active.transferred += count


def hold(model: nn.Module) -> None:
    """Tell the tracker, if one is watching, of a model whose weights came from files: no operator returned them."""
    if _active is not None:
        mark_resident(model, _active)


@dataclass
class Life:
    """Of one storage: rounded bytes, and the clock's moments of its birth and its death (None: still there)."""

    size: int
    host: bool
    birth: int
    death: int | None = None
    cause: str | None = None


@dataclass(frozen=True)
class PhasePeak:
    """Bytes at the moment of the phase's highest device total; `host` is the phase's highest host total."""

    total: int
    causes: dict[str, int]
    host: int


@dataclass
class Span:
    """A phase, from one moment of the clock on to another."""

    name: str
    start: int
    end: int | None = None


class MemoryTracker(TorchDispatchMode):
    """`record=False` keeps only `now` and `peak`, for long runs under a limit.

    `device`: where the run computes. On a card, what lies on the CPU is host RAM; on the CPU, and where it is not said,
    only what is made within `host_memory()`.
    """

    def __init__(self, *, limit: int | None = None, record: bool = True, device: torch.device | None = None) -> None:
        super().__init__()
        self.limit, self.record = limit, record
        self._on_card = device is not None and device.type != "cpu"
        self.now = self.peak = self.host_now = self.host_peak = 0
        self.flops = 0
        self.transferred = 0
        self._clock = 0
        self._live: dict[int, tuple[Any, Life]] = {}
        self._lives: list[Life] = []
        self._spans: list[Span] = []

    def __enter__(self) -> "MemoryTracker":
        global _active
        self._outer, _active = _active, self
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        global _active
        _active = self._outer
        super().__exit__(*exc)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call passes through torch.compile's switches, which take longer than the tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # asked twice as often as anything is computed
        out = func(*args, **kwargs)
        if (packet := func._overloadpacket) in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if isinstance(out, Tensor):
            self.add(out)
            return out
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self.add(value)
        return out

    def add(self, tensor: Tensor, cause: str | None = None) -> None:
        """Count a tensor's storage (once); for tensors that no operator returned, such as loaded weights."""
        kind = tensor.device.type
        if kind == "meta" and not hasattr(tensor, "fake_mode"):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (entry := self._live.get(key)) is not None:
            if cause is None:
                return
            entry[1].cause = cause
            if not entry[1].host or (self._on_card and kind == "cpu"):
                return
            self._drop(key)  # made as host memory and kept where it was: on the CPU, device memory from now on
        size = -(-storage.nbytes() // ROUNDING) * ROUNDING
        if size == 0:
            return
        host = (_making_host_memory and cause is None) or (self._on_card and kind == "cpu")
        self._count(storage, key, size, host, cause)

    def _count(self, storage: Any, key: int, size: int, host: bool, cause: str | None) -> None:
        self._clock += 1
        life = Life(size, host, self._clock, cause=cause)
        self._live[key] = (weakref.ref(storage, functools.partial(self._drop, key)), life)
        if self.record:
            self._lives.append(life)
        if life.host:
            self.host_now += size
            self.host_peak = max(self.host_peak, self.host_now)
            return
        self.now += size
        if self.limit is not None and self.now > self.limit:
            raise torch.OutOfMemoryError(
                f"tracker: {self.now / 2**20:.1f} MiB of tensors, limit {self.limit / 2**20:.1f} MiB"
            )
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, _: Any = None) -> None:
        entry = self._live.pop(key, None)
        if entry is None:
            return
        life = entry[1]
        self._clock += 1
        life.death = self._clock
        if life.host:
            self.host_now -= life.size
        else:
            self.now -= life.size

    def mark(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Say what these tensors are; those not seen yet, or seen as host memory, count as device memory from now on."""
        for tensor in tensors:
            self.add(tensor, cause)

    def enter_phase(self, name: str) -> None:
        """From now on, until the next call, is phase `name`."""
        if self._spans:
            self._spans[-1].end = self._clock
        self._spans.append(Span(name, self._clock))

    def mark_saved(self) -> None:
        """Everything of unknown cause that is alive now was kept for the backward pass: activations."""
        for _, life in self._live.values():
            if life.cause is None:
                life.cause = "activations"

    def lives(self) -> list[Life]:
        """All that was recorded, in the order of birth."""
        return self._lives

    def spans(self) -> list[Span]:
        """The phases, one after the other."""
        return self._spans

    def peaks(self) -> dict[str, PhasePeak]:
        """Phase -> bytes at its peak. A phase entered several times counts at its worst."""
        out: dict[str, PhasePeak] = {}
        for span in self._spans:
            peak = self._peak_within(span.start, span.end if span.end is not None else self._clock)
            if span.name not in out or peak.total > out[span.name].total:
                host = max(peak.host, out[span.name].host if span.name in out else 0)
                out[span.name] = PhasePeak(peak.total, peak.causes, host)
        return out

    def _peak_within(self, start: int, end: int) -> PhasePeak:
        changes: list[tuple[int, int, bool]] = []
        device = host = 0
        for life in self._lives:
            if life.birth > end or (life.death is not None and life.death <= start):
                continue
            if life.birth <= start:
                device, host = (device, host + life.size) if life.host else (device + life.size, host)
            else:
                changes.append((life.birth, life.size, life.host))
            if life.death is not None and life.death <= end:
                changes.append((life.death, -life.size, life.host))
        best, best_at, best_host = device, start, host
        for at, size, is_host in sorted(changes):
            if is_host:
                host += size
                best_host = max(best_host, host)
            else:
                device += size
                if device > best:
                    best, best_at = device, at
        return PhasePeak(best, self._causes_at(best_at), best_host)

    def _causes_at(self, moment: int) -> dict[str, int]:
        causes = dict.fromkeys(CAUSES, 0)
        for life in self._lives:
            if not life.host and life.birth <= moment and (life.death is None or life.death > moment):
                causes[life.cause or "temporary"] += life.size
        return causes


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """(dictionary that owns it, name, tensor) of a module's own parameters and buffers; they may be replaced meanwhile."""
    owner: Any
    for owner in (module._parameters, module._buffers):
        yield from ((owner, name, tensor) for name, tensor in list(owner.items()) if tensor is not None)


def mark_resident(model: nn.Module, tracker: MemoryTracker) -> None:
    """Tell which tensors of a model stay on the device: all but those of layers that have a `home` in host memory."""
    modules = [module for module in model.modules() if not hasattr(module, "home")]
    held = [tensor for module in modules for _, _, tensor in own_tensors(module)]
    tracker.mark((x for x in held if not x.requires_grad), "frozen")
    tracker.mark((x for x in held if x.requires_grad), "adapter")
