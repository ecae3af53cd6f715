"""NVML's answers about the pretended cards, given through `pynvml`: the module's functions are replaced where it is installed.

Environment: EMU_NAME, EMU_DRIVER, EMU_TOTAL, EMU_CAPABILITY; EMU_OTHERS (bytes that another process, number 1, holds);
EMU_DISPLAY (a display hangs on the card); EMU_NO_NVML (no driver answers).
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .card import DRIVER, NAME, capability, lib

OTHER = 1
"""The number of the process that holds EMU_OTHERS."""


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def memory(index: int, *_: Any) -> SimpleNamespace:
    total, used = lib.emu_total(), lib.emu_option_value(b"others") + lib.emu_process_bytes(index)
    return SimpleNamespace(total=total, used=used, free=total - used)


def processes(index: int) -> list[SimpleNamespace]:
    """Those with a context: perhaps another one, and this one from its first use of the card on."""
    held = {OTHER: lib.emu_option_value(b"others"), os.getpid(): lib.emu_process_bytes(index)}
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in held.items() if used]


def install() -> None:
    try:
        import pynvml
    except ImportError:
        return

    def error(code: int) -> Exception:
        return pynvml.NVMLError(code)

    def init(*_: Any) -> None:
        if os.environ.get("EMU_NO_NVML"):
            raise error(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def by_index(index: int) -> int:
        if not 0 <= index < lib.emu_device_count():
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(name: str | bytes) -> int:
        text = name.decode() if isinstance(name, bytes) else name
        known = {uuid(index): index for index in range(lib.emu_device_count())}
        if text not in known:
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return known[text]

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: DRIVER,
        "nvmlDeviceGetCount": lambda: lib.emu_device_count(),
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetName": lambda handle: NAME,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: capability(),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": processes,
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [],
        "nvmlDeviceGetDisplayActive": lambda handle: int(bool(os.environ.get("EMU_DISPLAY"))),
    }
    for name, answer in answers.items():
        setattr(pynvml, name, answer)
