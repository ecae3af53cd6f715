"""What torch.cuda.memory asks of the allocator: statistics, snapshots, traces, the limit."""

from typing import Any

from .card import lib, operators

KINDS = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
         "inactive_split_bytes", "requested_bytes")  # fmt: skip
POOLS = ("all", "small_pool", "large_pool")
SERIES = ("current", "peak", "allocated", "freed")
COUNTERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
STATES = ("inactive", "active_pending_free", "active_allocated")
_fractions: dict[int, float] = {}


def stats(device: int) -> dict[str, Any]:
    """Nested, as torch._C._cuda_memoryStats gives them; torch.cuda.memory_stats flattens."""
    values = iter(operators().memory_stats(device))
    nested: dict[str, Any] = {
        kind: {pool: {series: next(values) for series in SERIES} for pool in POOLS} for kind in KINDS
    }
    none = dict.fromkeys(SERIES, 0)
    return {**nested, "oversize_allocations": none, "oversize_segments": none, "max_split_size": -1,
            **{name: next(values) for name in COUNTERS}}  # fmt: skip


def segments(device: int) -> list[dict[str, Any]]:
    """As torch.cuda.memory_snapshot: each segment with its blocks. Addresses are the allocator's numbers."""
    flat, found = operators().pieces(device), {}
    for at in range(0, len(flat), 8):
        base, stream, small, expandable, address, size, requested, state = flat[at : at + 8]
        kind = "small" if small else "large"
        segment = found.setdefault(
            base,
            {"device": device, "address": base, "total_size": 0, "allocated_size": 0, "active_size": 0,
             "requested_size": 0, "stream": stream, "segment_type": kind, "segment_pool_id": (0, 0),
             "is_expandable": bool(expandable), "frames": [], "blocks": []},
        )  # fmt: skip
        segment["total_size"] += size
        segment["allocated_size"] += size if state == 2 else 0
        segment["active_size"] += size if state else 0
        segment["requested_size"] += requested
        segment["blocks"].append(
            {"address": address, "size": size, "requested_size": requested, "state": STATES[state], "frames": []}
        )
    return list(found.values())


def trace(device: int) -> list[dict[str, Any]]:
    """The events since _record_memory_history, without stacks."""
    rows = (line.split() for line in operators().events(device))
    return [
        {"action": action, "addr": int(address), "size": int(size), "stream": int(stream), "frames": []}
        for action, address, size, stream in rows
    ]


def as_trace(device: int = 0) -> dict[str, Any]:
    """The events since _record_memory_history (on an empty card) in the form of ../traces: kind, address, bytes."""
    kinds = {"segment_alloc": "s", "segment_free": "r", "alloc": "a", "free_completed": "f"}
    rows = [[kinds[e["action"]], e["addr"], e["size"]] for e in trace(device) if e["action"] in kinds]
    return {"segments": [], "live": [], "events": rows}


def snapshot(*_: Any) -> dict[str, Any]:
    devices = range(lib.emu_device_count())
    found = [segment for device in devices for segment in segments(device)]
    return {"segments": found, "device_traces": [trace(device) for device in devices],
            "allocator_settings": {}, "external_annotations": []}  # fmt: skip


def record_history(enabled: str | None = "all", *_: Any, **__: Any) -> None:
    for device in range(lib.emu_device_count()):
        operators().record_events(device, enabled is not None)


def set_fraction(fraction: float, device: int) -> None:
    _fractions[device] = fraction
    lib.emu_set_cap(device, int(fraction * lib.emu_total()))


IN_C = {
    "_cuda_memoryStats": stats,
    "_cuda_resetPeakMemoryStats": lambda device: lib.emu_reset_peaks(device),
    "_cuda_resetAccumulatedMemoryStats": lambda device: None,
    "_cuda_emptyCache": lambda *_: lib.emu_empty_cache(),
    "_cuda_memorySnapshot": snapshot,
    "_cuda_record_memory_history": record_history,
    "_cuda_setMemoryFraction": set_fraction,
    "_cuda_getMemoryFraction": lambda device: _fractions.get(device, 1.0),
    "_cuda_getAllocatorBackend": lambda: "native",
}
