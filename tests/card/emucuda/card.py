"""The library as Python sees it, and what the environment says the card is."""

import atexit
import ctypes
import os
import sys
import time
from typing import Any

from . import build

NAME = os.environ.get("EMU_NAME", "Emulated card")
DRIVER = os.environ.get("EMU_DRIVER", "570.00")
_RETURNS = {
    "emu_free": ctypes.c_int64,
    "emu_total": ctypes.c_int64,
    "emu_allocated": ctypes.c_int64,
    "emu_process_bytes": ctypes.c_int64,
    "emu_count": ctypes.c_int64,
    "emu_option_value": ctypes.c_int64,
}
_TAKES = {
    "emu_set_cap": (ctypes.c_int, ctypes.c_int64),
    "emu_lock_host": (ctypes.c_int64, ctypes.c_int64),
    "emu_unlock_host": (ctypes.c_int64,),
    "emu_oom_after": (ctypes.c_int64,),
    "emu_forbid": (ctypes.c_uint64,),
    "emu_option": (ctypes.c_char_p, ctypes.c_int64),
    "emu_option_value": (ctypes.c_char_p,),
    "emu_count": (ctypes.c_char_p,),
    "emu_touch_device": (ctypes.c_char_p,),
    "emu_seed": (ctypes.c_int, ctypes.c_int64),
}
lib: Any = None


def load() -> None:
    """Before torch: its libraries, so that ours finds their symbols, and then ours."""
    global lib
    folder = build.torch_folder()
    assert folder is not None, "no torch"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(build.library()), mode=ctypes.RTLD_GLOBAL)
    for name, kind in _RETURNS.items():
        getattr(lib, name).restype = kind
    for name, kinds in _TAKES.items():
        getattr(lib, name).argtypes = kinds


def operators() -> Any:
    import torch

    return torch.ops.emu


# -- what a test asks and does


def capability() -> tuple[int, int]:
    return divmod(lib.emu_capability(), 10)


def count(name: str) -> int:
    """One of `counts`: "h2d.async", "host_syncs", "allocations", "locked" …"""
    return lib.emu_count(name.encode())


def counts() -> dict[str, int]:
    lines = operators().counts().splitlines()
    return {name: int(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def reports() -> list[str]:
    """The faults found since `clear`."""
    return list(operators().reports())


def clear() -> None:
    lib.emu_clear()


def live() -> list[str]:
    """A line for each block in use: number, bytes, who wrote it last."""
    return list(operators().live())


def oom_after(n: int) -> None:
    """The n-th allocation from now fails, once; 0: none."""
    lib.emu_oom_after(n)


def forbid(*cards: int) -> None:
    """From now on anything done on these cards is reported ("wrong-card")."""
    lib.emu_forbid(sum(1 << card for card in cards))


def lag(on: bool) -> None:
    """A card that does nothing before the host waits for it: memory given to record_stream comes back only then."""
    lib.emu_flag(b"lags", int(on))


def no_kernels(on: bool) -> None:
    """A card for which the wheel has no kernels."""
    lib.emu_flag(b"no_kernel", int(on))


def set_card(*, total: int | None = None, capability: float | None = None, others: int | None = None) -> None:
    """Another card from now on: bytes in all, compute capability, bytes that other processes hold."""
    scaled = None if capability is None else round(capability * 10)
    for name, value in (("total", total), ("capability", scaled), ("others", others)):
        if value is not None:
            lib.emu_option(name.encode(), value)


def tell_at_exit() -> None:
    atexit.register(_tell)


def _tell() -> None:
    time.sleep(0.1)  # autograd's threads may still want the GIL, which they must not do once Python ends
    found = reports()
    if not found and not os.environ.get("EMU_STATS"):
        return
    print("== emucuda ==", *found[:20], sep="\n  ", file=sys.stderr)
    print(*(f"  {name} {value}" for name, value in counts().items()), sep="\n", file=sys.stderr)
