"""A whole program, event by event, against what a real card's allocator did (traces/attention_from_cold): 3 GiB of host memory."""

import gzip
import json
import math
from pathlib import Path

import emucuda  # noqa: F401
import psutil
import pytest
import torch

TRACE = Path(__file__).parents[1] / "traces" / "attention_from_cold.json.gz"
NAMES = {"segment_alloc": "s", "alloc": "a", "free_completed": "f"}
BATCH, LENGTH, DIM = 8, 4096, 16
REDUCTION = {4, 256}
"""Bytes: what a kernel that sums everything takes for its blocks' results and their count; not pretended."""


def softmax(x):
    highest = torch.max(x, dim=-1, keepdim=True)  # its indices live as long
    exponentials = torch.exp(x - highest.values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def attention(q, k, v):
    scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(DIM)
    return torch.einsum("bqk,bkd->bqd", softmax(scores), v)


def program():
    """What it returns lived on while the trace was taken."""
    q, k, v = (torch.randn(BATCH, LENGTH, DIM, device="cuda", requires_grad=True) for _ in range(3))
    out = attention(q, k, v)
    loss = out.sum()
    loss.backward()
    return q, k, v, out, loss


@pytest.mark.skipif(psutil.virtual_memory().available < 6 << 30, reason="less than 6 GiB of host memory is free")
def test_the_allocator_did_the_same():
    theirs = [(kind, size) for kind, _, size in json.loads(gzip.decompress(TRACE.read_bytes()))["events"]]
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    kept = program()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    ours = [(NAMES[event["action"]], event["size"]) for event in events if event["action"] in NAMES]
    assert large(ours) == large(theirs)
    assert torch.cuda.max_memory_reserved() == sum(size for kind, size in theirs if kind == "s")
    del kept


def large(events):
    return [event for event in events if event[1] not in REDUCTION]
