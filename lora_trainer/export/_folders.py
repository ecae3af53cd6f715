"""Folders and files that appear whole or not at all, and safetensors files written one tensor at a time."""

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..atomic import replacing
from ..errors import MachineError, t

LEFT_BEHIND = re.compile(r"\..+\.(\d{1,9})\.(?:tmp|old)")
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor to be written; `make` is called when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@contextmanager
def new_folder(folder: Path, nbytes: int = 0) -> Iterator[Path]:
    """A place to write into that becomes `folder` at the end, and is gone after any failure."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        free = shutil.disk_usage(folder.parent).free
        if free < nbytes:
            raise OSError(errno.ENOSPC, f"{free} < {nbytes}")
        temporary.mkdir()
        yield temporary
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
    except OSError as error:
        raise MachineError.said(
            pt=f"não foi possível gravar a pasta ({_reason(error)})",
            en=f"the folder could not be written ({_reason(error)})",
            hint_pt=f"ela precisa de {nbytes / 2**30:.1f} GiB; libere espaço ou mude saida.diretorio",
            hint_en=f"it needs {nbytes / 2**30:.1f} GiB; free some space or change output.dir",
            where=str(folder),
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """What processes killed while writing left half done: gigabytes, of a merged model."""
    for path in parent.iterdir():
        left = LEFT_BEHIND.fullmatch(path.name)
        if left and not psutil.pid_exists(int(left[1])):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def new_file(path: Path, nbytes: int) -> Iterator[Path]:
    """A place to write into that becomes `path` at the end; after any failure that is what it was before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise MachineError.said(
            pt=f"não foi possível gravar o arquivo ({_reason(error)})",
            en=f"the file could not be written ({_reason(error)})",
            hint_pt=f"libere {nbytes / 2**20:.0f} MiB ou mude saida.diretorio",
            hint_en=f"free {nbytes / 2**20:.0f} MiB or change output.dir",
            where=str(path),
        ) from error


def _reason(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return t(pt="o disco está cheio", en="the disk is full") if full else str(error)


def write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def header_bytes(header: Mapping[str, object]) -> bytes:
    """How a safetensors file begins."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(path: Path, entries: Sequence[Entry]) -> None:
    """A safetensors file; memory holds one tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    with path.open("wb") as file:
        file.write(header_bytes(header))
        for entry in entries:
            tensor = entry.make().contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), entry.name
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_shards(folder: Path, entries: Sequence[Entry], shard_bytes: int) -> list[Path]:
    """model.safetensors, or several of at most `shard_bytes` (or one tensor) with an index, as transformers names them."""
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + entry.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    many = len(shards) > 1
    names = [
        f"model-{n:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
        for n in range(1, len(shards) + 1)
    ]
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, shard)
    if many:
        places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": places}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return [folder / name for name in names]
