"""Host memory that holds what the card does not: plain, page-locked, or backed by a file.

Page-locked memory is ordinary memory registered with CUDA, because torch's pinned allocator rounds every request up to a
power of two. Everything here counts as host RAM for the tracker, mapped files too: what they need is disk.
"""

import logging
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .tracker import host_memory

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def compute_device(model: nn.Module, streamed: Iterable[nn.Module] = ()) -> torch.device:
    """Where a model computes: where its weights are, packed or not, that are not brought from a `home` elsewhere.

    `streamed`: blocks that will be. A table that stays on the CPU (Chroma's, of sines) says nothing of a model on a card.
    """
    inside = {id(module) for block in streamed for module in block.modules()}
    here = (module for module in model.modules() if id(module) not in inside and not hasattr(module, "home"))
    tensors = (tensor for module in here for tensor in (*module._parameters.values(), *module._buffers.values()))
    found = [tensor.device for tensor in tensors if tensor is not None]
    assert found, "a model is more than its streamed blocks"
    return next((device for device in found if device.type != "cpu"), found[0])


def host_buffer(nbytes: int, like: Tensor, *, locked: bool = False) -> Tensor:
    """(nbytes,) uint8 in host memory, fake where `like` is; `locked` pages let copies run beside computation."""
    with host_memory():
        buffer = like.new_empty(nbytes, dtype=torch.uint8, device=CPU)
    if locked and nbytes:
        _lock(buffer)
    return buffer


def mapped_buffer(nbytes: int, like: Tensor, folder: Path) -> Tensor:
    """As host_buffer, in a file of `folder` that goes away with the process; its pages leave RAM when others need it."""
    if is_fake(like):
        return host_buffer(nbytes, like)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="weights-", suffix=".tmp", dir=folder)
    os.close(handle)
    try:
        with host_memory():
            buffer = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    finally:
        _remove(name)
    if Path(name).exists():  # Windows keeps mapped files
        weakref.finalize(buffer.untyped_storage(), _remove, name)
    return buffer


def _remove(name: str) -> None:
    try:
        Path(name).unlink(missing_ok=True)
    except PermissionError:
        logger.debug("%s is still mapped", name)


def _lock(buffer: Tensor) -> None:
    """Without it all works, slower: a refusal (little RAM, Windows' limits) is only noted."""
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0:
        weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
        return
    logger.warning("%d MiB of host memory could not be page-locked; streaming will be slower", buffer.nbytes >> 20)
    try:
        torch.zeros(1, device="cuda")  # the refusal stays CUDA's last error until a launch reports it
    except RuntimeError as error:
        logger.debug("%s", error)
