"""One CUDA card as a plain record, and who else is on it.

PyTorch tells name, capability and memory; NVML, where it answers, tells which other processes hold the card and whether
a display hangs on it. Every rule elsewhere is a function of this record. Left out: AMD's and Intel's counters.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from ..units import gib


@dataclass(frozen=True)
class Holder:
    """Another process on the card; `bytes` is None where the system keeps it to itself (Windows, WSL)."""

    name: str
    bytes: int | None = None

    def __str__(self) -> str:
        return self.name if self.bytes is None else f"{self.name} {gib(self.bytes)}"


@dataclass(frozen=True)
class Card:
    """One CUDA (or ROCm) device; memory in bytes."""

    name: str
    capability: tuple[int, int]
    total: int = 0
    free: int = 0
    index: int = 0
    """As PyTorch counts: after CUDA_VISIBLE_DEVICES."""
    context_made: bool = True
    """`free` no longer holds this process's own CUDA context: asking PyTorch for free memory makes one."""
    holders: tuple[Holder, ...] | None = None
    """None where NVML does not answer."""
    display: bool = False


def read_card(index: int) -> Card:
    """By PyTorch alone; makes a CUDA context on the card."""
    free, total = torch.cuda.mem_get_info(index)
    return Card(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), total, free, index=index)


def read_cards(count: int) -> tuple[Card, ...]:
    """All visible cards. With several, NVML is asked first: a context on each would take memory from all of them."""
    cards = []
    for index in range(count):
        handle = _handle(index)
        memory = _ask("nvmlDeviceGetMemoryInfo", handle) if count > 1 else None
        total = torch.cuda.get_device_properties(index).total_memory
        # Of a MIG slice, NVML's handle is the whole card.
        if memory is not None and abs(memory.total - total) < total // 8:
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            card = Card(name, capability, total, int(memory.free), index=index, context_made=False)
        else:
            card = read_card(index)
        cards.append(_with_neighbours(card, handle))
    return tuple(cards)


def driver_version() -> str | None:
    """NVIDIA's driver version, or None when no driver answers."""
    version = _ask("nvmlSystemGetDriverVersion")
    return None if version is None else str(version)


# -- NVML


def _nvml() -> Any:
    """The initialised module, or None: not installed, no driver, or a driver that does not let us in."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _ask(function: str, *arguments: Any) -> Any:
    """One NVML question; None where it has no answer for this card or system."""
    nvml = _nvml()
    if nvml is None or None in arguments:
        return None
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError:
        return None


def _handle(index: int) -> Any:
    """By UUID: NVML counts all cards, PyTorch only the visible ones."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else _ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")


def _with_neighbours(card: Card, handle: Any) -> Card:
    lists = [
        _ask(question, handle)
        for question in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    ]
    if lists == [None, None]:
        return card
    found = {process.pid: process for processes in lists for process in processes or ()}
    holders = [
        Holder(_process_name(pid), process.usedGpuMemory) for pid, process in found.items() if pid != os.getpid()
    ]
    return replace(card, holders=largest_first(holders), display=bool(_ask("nvmlDeviceGetDisplayActive", handle)))


def largest_first(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    return tuple(sorted(holders, key=lambda holder: holder.bytes or 0, reverse=True))


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return f"pid {pid}"
