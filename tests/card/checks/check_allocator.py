"""The caching allocator: real cards' traces, segments, the limit, deferred frees, and what torch.cuda.memory tells."""

import gzip
import json
from itertools import chain
from pathlib import Path

import emucuda
import pytest
import torch

MIB = 1 << 20
TRACES = sorted((Path(__file__).parents[1] / "traces").glob("*.json.gz"))
pytestmark = pytest.mark.usefixtures("empty_card")


def tensor(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")


# -- against real cards


def what_the_card_made(trace):
    """Reserved peak, and how many segments were new."""
    now = peak = sum(size for _, size in trace["segments"])
    new = 0
    for kind, _, size in trace["events"]:
        now += {"s": size, "r": -size}.get(kind, 0)
        new += kind == "s"
        peak = max(peak, now)
    return peak, new


def replay(trace, limit=0):
    events = [(ord(kind), address, size) for kind, address, size in trace["events"]]
    flat = [list(chain.from_iterable(rows)) for rows in (trace["segments"], sorted(trace["live"]), events)]
    peak, new, _ = torch.ops.emu.replay(*flat, limit)
    return peak, new


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.partition(".")[0])
def test_reserved_is_that_of_a_real_card(path):
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert replay(trace) == what_the_card_made(trace)


def test_what_was_recorded_here_replays_the_same():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = [tensor(mib) for mib in (30, 0.2, 5, 12, 3)]
    kept[0] = kept[3] = None
    kept += [tensor(40), tensor(8)]
    trace = emucuda.as_trace()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert replay(trace) == what_the_card_made(trace) == (torch.cuda.max_memory_reserved(), 4)
    del kept


def test_a_limit_is_kept_or_refused():
    (path,) = [path for path in TRACES if "attention_from_cold" in path.name]
    trace = json.loads(gzip.decompress(path.read_bytes()))
    peak, _ = replay(trace)
    assert replay(trace, peak)[0] == peak
    with pytest.raises(torch.OutOfMemoryError):
        replay(trace, peak // 2)


# -- segments


@pytest.mark.parametrize(
    ("mib", "reserved"), [(0.001, 2), (1, 2), (1.001, 20), (9.9, 20), (10, 10), (11, 12), (21, 22)]
)
def test_segment_sizes(mib, reserved):
    kept = tensor(mib)
    assert torch.cuda.memory_reserved() == reserved * MIB
    del kept


def test_small_pieces_share_a_segment():
    kept = [tensor(0.5) for _ in range(4)]
    assert torch.cuda.memory_reserved() == 2 * MIB
    assert torch.cuda.memory_stats()["segment.small_pool.current"] == 1
    del kept


def test_best_fit_reuses_the_smallest_that_fits():
    kept = [tensor(30), tensor(1.5), tensor(24), tensor(1.5)]
    kept[2] = kept[0] = None
    kept.append(tensor(23))
    assert torch.cuda.memory_reserved() == (30 + 20 + 24) * MIB


def test_large_pieces_keep_a_rest_of_more_than_one_mib():
    kept = [tensor(20)]
    kept[0] = None
    kept[0] = tensor(19.5)  # the rest is too small to keep: it belongs to the piece
    assert torch.cuda.memory_allocated() == 20 * MIB
    kept[0] = None
    kept[0] = tensor(18)
    assert torch.cuda.memory_allocated() == 18 * MIB


def test_streams_have_pools_of_their_own():
    first = tensor(20)
    del first
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        second = tensor(20)
    assert torch.cuda.memory_reserved() == 40 * MIB
    del second


def test_empty_cache_gives_back_what_is_whole():
    kept = [tensor(30), tensor(5), tensor(5)]
    kept[0] = kept[1] = None
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB  # half of that segment is still in use


# -- the limit


def test_at_the_limit_cached_segments_are_given_back_and_it_is_tried_again():
    torch.cuda.set_per_process_memory_fraction(100 * MIB / torch.cuda.mem_get_info()[1])
    tensor(60)
    kept = tensor(70)
    stats = torch.cuda.memory_stats()
    assert stats["num_alloc_retries"] >= 1
    assert torch.cuda.memory_reserved() == 70 * MIB
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40\.00 MiB"):
        tensor(40)
    assert torch.cuda.memory_stats()["num_ooms"] == stats["num_ooms"] + 1
    tensor(30)
    assert torch.cuda.max_memory_reserved() == 100 * MIB
    del kept


def test_a_card_is_full_when_context_and_others_leave_nothing():
    free, total = torch.cuda.mem_get_info()
    emucuda.set_card(others=free - 50 * MIB)
    try:
        kept = tensor(40)
        with pytest.raises(torch.OutOfMemoryError):
            tensor(20)
        assert torch.cuda.mem_get_info() == (10 * MIB, total)
        del kept
        tensor(50)
    finally:
        emucuda.set_card(others=0)


# -- frees that wait for other streams


def lend(mib):
    """A tensor that a side stream uses last."""
    side, x = torch.cuda.Stream(), tensor(mib)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.fill_(1)
    x.record_stream(side)


def test_memory_lent_to_a_stream_comes_back_when_that_is_done():
    emucuda.lag(True)
    try:
        for _ in range(3):
            lend(20)
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == 60 * MIB
        assert torch.cuda.max_memory_reserved() == 60 * MIB
        torch.cuda.synchronize()
        lend(20)
        assert torch.cuda.memory_reserved() == 60 * MIB
        torch.cuda.synchronize()
    finally:
        emucuda.lag(False)


def test_a_card_that_keeps_up_gives_it_back_at_once():
    for _ in range(3):
        lend(20)
    assert torch.cuda.max_memory_reserved() == 20 * MIB


def test_short_memory_waits_for_the_streams():
    emucuda.lag(True)
    try:
        torch.cuda.set_per_process_memory_fraction(50 * MIB / torch.cuda.mem_get_info()[1])
        for _ in range(3):
            lend(20)
        assert torch.cuda.memory_stats()["num_sync_all_streams"] >= 1
    finally:
        torch.cuda.synchronize()
        emucuda.lag(False)


# -- what it tells


def test_statistics_and_peaks():
    tensor(30)
    kept = tensor(3)
    assert torch.cuda.max_memory_allocated() == 30 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 3 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["inactive_split_bytes.all.current"] == 27 * MIB
    assert stats["reserved_bytes.large_pool.current"] == torch.cuda.memory_reserved() == 30 * MIB
    assert "Tot Alloc" in torch.cuda.memory_summary()
    del kept


def test_snapshot_and_trace():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    kept = tensor(5)
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    (segment,) = snapshot["segments"]
    assert segment["total_size"] == 20 * MIB
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]
    assert [event["action"] for event in snapshot["device_traces"][0]] == ["segment_alloc", "alloc"]
    del kept
    assert torch.cuda.memory_snapshot()[0]["blocks"][0]["state"] == "inactive"


# -- cuBLAS' workspaces


WORKSPACE = 8_519_680


def test_the_first_product_brings_a_workspace():
    x = torch.ones(4, 4, device="cuda")
    before = torch.cuda.memory_allocated()
    x @ x
    assert torch.cuda.memory_allocated() - before == WORKSPACE
    x @ x
    assert torch.cuda.memory_allocated() - before == WORKSPACE


def test_autograds_thread_has_another():
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    (x @ x).sum().backward()
    x.grad = None
    assert torch.cuda.memory_allocated() - before == 2 * WORKSPACE


def test_each_stream_has_its_own():
    x, side = torch.ones(4, 4, device="cuda"), torch.cuda.Stream()
    x @ x
    side.wait_stream(torch.cuda.current_stream())
    before = torch.cuda.memory_allocated()
    with torch.cuda.stream(side):
        x @ x
    assert torch.cuda.memory_allocated() - before == WORKSPACE
    torch.cuda.synchronize()


def test_hopper_takes_more():
    emucuda.set_card(capability=9.0)
    try:
        x = torch.ones(4, 4, device="cuda")
        before = torch.cuda.memory_allocated()
        x @ x
        assert torch.cuda.memory_allocated() - before == 32 * MIB
    finally:
        emucuda.set_card(capability=7.5)


def test_matrices_that_cublas_does_not_take_are_copied_for_the_time():
    x, spread = torch.ones(64, 64, 64, device="cuda"), torch.ones(1, device="cuda").expand(64, 64, 64)
    spread @ x
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x.transpose(1, 2) @ x
    assert torch.cuda.max_memory_allocated() - before == x.nbytes
    torch.cuda.reset_peak_memory_stats()
    spread @ x
    assert torch.cuda.max_memory_allocated() - before == 2 * x.nbytes
