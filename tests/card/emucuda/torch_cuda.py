"""torch.cuda on the pretended card: the C functions it calls are supplied, so that its own Python code does the rest.

Replaced outright are only streams and events (torch's generic ones serve), and the random state.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch

from . import memory
from .card import NAME, capability, lib, operators

FLASH, EFFICIENT = 1, 2
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


def index_of(device: Any = None) -> int:
    """As torch.cuda._utils does: the current card where none is said."""
    if device is None or device == "cuda":
        return lib.emu_get_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return lib.emu_get_device() if index is None else index


# -- streams


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> "Stream":
        return torch.Stream.__new__(cls, torch.device("cuda", index_of(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> "Event":
        return torch.Event.__new__(cls, torch.device("cuda", index_of()), enable_timing=enable_timing)


class StreamContext:
    """As torch.cuda.stream: the stream's card becomes the current one, too."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.card = lib.emu_exchange_device(self.stream.device_index)
            self.before = current_stream(self.stream.device_index)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self.before)
            lib.emu_exchange_device(self.card)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=1)


# -- the runtime


class Runtime:
    """libcudart. Refuses page-locking where EMU_NO_LOCK is set, and past EMU_LOCK_LIMIT bytes in all."""

    refused = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        lib.emu_touch_device(b"page-locking")
        limit = int(os.environ.get("EMU_LOCK_LIMIT", 1 << 50))
        if os.environ.get("EMU_NO_LOCK") or lib.emu_count(b"locked") + size > limit:
            Runtime.refused += 1
            return 2
        lib.emu_lock_host(address, size)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        lib.emu_unlock_host(address)
        return 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        before = lib.emu_exchange_device(device)
        lib.emu_touch_device(b"a question for free memory")
        lib.emu_exchange_device(before)
        return lib.emu_free(device), lib.emu_total()


def properties(index: int) -> SimpleNamespace:
    major, minor = capability()
    uuid = f"00000000-0000-0000-0000-{index:012d}"
    values = {"name": NAME, "total_memory": lib.emu_total(), "major": major, "minor": minor, "uuid": uuid}
    return SimpleNamespace(**values, multi_processor_count=20, warp_size=32, gcnArchName="", is_integrated=False)


def set_device(index: int) -> None:
    if lib.emu_exchange_device(index) < 0:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")


def exchange_device(index: int) -> int:
    before = lib.emu_get_device()
    set_device(index)
    return before


def can_use(backend: int, params: Any, debug: bool = False) -> bool:
    p = params
    return operators().can_use(backend, p.query, p.key, p.value, p.attn_mask, p.dropout, p.is_causal, p.enable_gqa)


# -- random numbers


def manual_seed(seed: int) -> None:
    lib.emu_seed(lib.emu_get_device(), seed & (2**63 - 1))


def manual_seed_all(seed: int) -> None:
    for index in range(lib.emu_device_count()):
        lib.emu_seed(index, seed & (2**63 - 1))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return operators().rng_state(index_of(device))


def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
    operators().set_rng_state(index_of(device), state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(lib.emu_device_count())]


def set_rng_state_all(states: Any) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# -- all of it into torch

IN_C = {
    "_cuda_init": lambda: None,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_getDeviceCount": lambda: lib.emu_device_count(),
    "_cuda_getDevice": lambda: lib.emu_get_device(),
    "_cuda_setDevice": set_device,
    "_cuda_exchangeDevice": exchange_device,
    "_cuda_maybeExchangeDevice": exchange_device,
    "_cuda_synchronize": lambda: lib.emu_synchronize(-1),
    "_cuda_getArchFlags": lambda: ARCHITECTURES,
    "_cuda_canDeviceAccessPeer": lambda one, other: False,
    "_cuda_ipc_collect": lambda: None,
    "_cuda_isCurrentStreamCapturing": lambda: False,
    "_cuda_clearCublasWorkspaces": lambda: lib.emu_drop_workspaces(),
    "_can_use_flash_attention": lambda params, debug=False: can_use(FLASH, params),
    "_can_use_mem_efficient_attention": lambda params, debug=False: can_use(EFFICIENT, params),
    "_can_use_cudnn_attention": lambda params, debug=False: False,
    **memory.IN_C,
}
IN_CUDA = {
    "_initialized": True,
    "_cudart": Runtime(),
    "_get_device_properties": properties,
    "_device_count_nvml": lambda: -1,  # a real driver may be there, and would count real cards
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": exchange_device,
    "Stream": Stream,
    "Event": Event,
    "stream": StreamContext,
    "StreamContext": StreamContext,
    "set_stream": torch.accelerator.set_stream,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "is_current_stream_capturing": lambda: False,
    "initial_seed": lambda: 0,
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed_all,
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state_all": set_rng_state_all,
}


def install() -> None:
    for name, value in IN_C.items():
        setattr(torch._C, name, value)
    for name, value in IN_CUDA.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)
    torch.version.cuda = "12.8"
