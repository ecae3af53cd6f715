"""After an out-of-memory in mid-run: was it one, and what is the next, tighter rung?

Only rungs that change no number: smaller micro-batches of the same window, recomputation, embeddings and activations in host
memory, more streamed blocks, the optimizer's moments in host memory. What the user fixed stays. The run drops the half-done
window, takes a rung and does the window again, so the effective batch, the order of the data and the noise are those of a run
that had the last plan from its start.
"""

import contextlib
import ctypes
import gc
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..loop import TornUpdate

_DISGUISES = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|not enough memory"
)
Result = TypeVar("Result")
_OLDEST = torch.zeros((), requires_grad=True)
_OLDEST_NODE, _ONE = _OLDEST + 0, torch.ones(())
"""When a backward pass fails, what autograd's engine had queued stays in the thread's queue, gradients and graph with it.
The next pass drops it, but only as far as its own nodes are older: nodes run youngest first. This one is older than all, and
walking it allocates nothing."""


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory that is over: nothing here holds on to the computation that failed."""

    problem: str
    torn: bool = False
    """Weights were being updated."""


def is_out_of_memory(error: BaseException) -> bool:
    """Also where a library says so in its own words: cuBLAS and cuDNN allocate beside PyTorch's allocator."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_DISGUISES.search(str(error)))


def attempt(action: Callable[[], Result]) -> Result | Shortage:
    """The action's result, or the shortage it ended in, with all its tensors let go."""
    try:
        return action()
    except Exception as error:
        torn = isinstance(error, TornUpdate)
        if not is_out_of_memory(error.__cause__ or error if torn else error):
            raise
        shortage = Shortage(str(error).partition("\n")[0], torn)
        cause: BaseException | None = error
        while cause is not None:  # frames of the failed computation hold its tensors
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
    return shortage


def free_memory(device: torch.device) -> None:
    """Give back what is cached but not in use, and what a failed backward pass left behind."""
    torch.autograd.grad(_OLDEST_NODE, _OLDEST, _ONE, retain_graph=True)
    gc.collect()
    _trim_host_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _trim_host_memory() -> None:
    """glibc keeps what was freed in small pieces: a gigabyte after a base was read and streamed from a master."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
            ctypes.CDLL("libc.so.6").malloc_trim(0)
