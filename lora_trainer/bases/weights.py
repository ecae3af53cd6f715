"""Tensors on disk: several .safetensors files seen as one dictionary, and where in it a parameter's value may lie.

Files are read, not mapped: a mapped file keeps its pages in the process, cannot be replaced under Windows, and hands out views
that torch refuses where a header is not aligned. What a file stores in few bits may stay so (stored.py), but for int8 (int8.py).
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files.headers import Header, read_bytes, read_header
from . import four_bit, int8

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FP8 = ("F8_E4M3", "F8_E5M2")
HASH_CHUNK_BYTES = 1 << 22


Share = tuple[Fraction, Fraction]
"""Of a tensor's rows: where it begins, how much it is."""
WHOLE: Share = (Fraction(0), Fraction(1))


@dataclass(frozen=True)
class Piece:
    """Where a parameter may lie: a key; of a fused tensor, which `share` of the rows; whether it is stored transposed, with
    its two halves of rows exchanged, or with the rows of each of `pairs` heads that rotate together side by side (llama.cpp)
    instead of half a head apart."""

    key: str
    transposed: bool = False
    share: Share = WHOLE
    swapped: bool = False
    pairs: int = 0
    shift: float = 0.0
    """What is added to the values."""

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        shape = (self.span(stored[0])[1], *stored[1:]) if stored else stored
        return shape[::-1] if self.transposed else shape

    def span(self, stored_rows: int) -> tuple[int, int]:
        """First row, number of rows."""
        first, number = self.share
        return int(first * stored_rows), int(number * stored_rows)

    def cut(self, tensor: Tensor) -> Tensor:
        if self.share != WHOLE:
            first, number = self.span(len(tensor))
            tensor = tensor[first : first + number]
        return self.finished(tensor.T if self.transposed else tensor)

    def finished(self, rows: Tensor) -> Tensor:
        rows = self.ordered(rows)
        return rows + self.shift if self.shift else rows

    def ordered(self, rows: Tensor) -> Tensor:
        if self.pairs:
            return rows.unflatten(0, (self.pairs, -1, 2)).transpose(1, 2).reshape(rows.shape)
        return rows.roll(len(rows) // 2, 0) if self.swapped else rows


def bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without ones: a 1x1 convolution and a linear layer hold the same matrix, a kernel one frame deep is one of two
    dimensions, and llama.cpp leaves them out."""
    return tuple(side for side in shape if side != 1)


Locate = Callable[[str], Sequence[Piece]]
"""A module's parameter name -> the pieces that may hold it, the likeliest first."""


@dataclass(frozen=True)
class Spelled:
    """The sizes that a file's header tells of a module, asked by the module's names however the file spells them."""

    header: Header
    locate: Locate

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a parameter, as the module has it; None where the file lacks it."""
        pieces = (piece for piece in self.locate(name) if piece.key in self.header)
        return next((piece.shape(self.header[piece.key].shape) for piece in pieces), None)

    def sides(self, layer: str, rank: int = 2) -> tuple[int, ...]:
        """Of a layer's weight; ones where it is missing or of another rank."""
        shape = self.shape(f"{layer}.weight")
        return shape if shape is not None and len(shape) == rank else (1,) * rank

    def __contains__(self, name: str) -> bool:
        return any(piece.key in self.header for piece in self.locate(name))

    def count(self, pattern: str) -> int:
        """How many of pattern.format(0), pattern.format(1), … are there without a gap."""
        return next(number for number in itertools.count() if pattern.format(number) not in self)


class Weights:
    """Several .safetensors files seen as one dictionary."""

    def __init__(self, files: Mapping[Path, Header]) -> None:
        self._files = {name: path for path, header in files.items() for name in header}
        self.header: Header = {name: info for header in files.values() for name, info in header.items()}
        self._notes: dict[str, dict[str, Any]] = {}

    @classmethod
    def open(cls, files: Iterable[Path], what: str) -> "Weights":
        return cls({path: read_header(path, what)[0] for path in files})

    def __contains__(self, key: str) -> bool:
        return key in self.header

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the values, whatever they are stored as."""
        return self.quantised_shape(key) or self.header[key].shape

    def readable(self, key: str) -> bool:
        known = self.header[key].dtype in DTYPES or self.quantised_shape(key) is not None
        return known or int8.note(self, key) is not None

    def companions(self, key: str) -> list[str]:
        """Keys that are read along with this one."""
        if int8.note(self, key) is not None:
            return [int8.note_key(key), *filter(None, [self.scale_of(key)])]
        scale = self.scale_of(key) if self.header[key].dtype in FP8 else None
        state = [name for name in self.header if name.startswith(f"{key}.")] if self.quantised_shape(key) else []
        return [scale] if scale else state

    def quantised_shape(self, key: str) -> tuple[int, ...] | None:
        """Of a matrix that bitsandbytes has packed into 4 bits; None for any other."""
        state = four_bit.quant_state(self, key) if self.header[key].dtype == "U8" else None
        return None if state is None else tuple(state["shape"])

    def read(self, key: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        info = self.header[key]
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        read_bytes(self._files[key], info.offset, raw.numpy().data)
        return raw.view(DTYPES.get(info.dtype, torch.uint8)).reshape(info.shape)

    def note(self, key: str) -> dict[str, Any]:
        """JSON that is kept as a tensor."""
        if key not in self._notes:
            self._notes[key] = json.loads(bytes(self.read(key).tolist()))
        return self._notes[key]

    def scale_of(self, key: str) -> str | None:
        """The factor that belongs to an fp8 tensor, in the spellings of ComfyUI and others."""
        stem = key.removesuffix("weight")
        names = (f"{stem}scale_weight", f"{stem}weight_scale", f"{key}.scale_weight", f"{key}_scale")
        return next((name for name in names if name in self), None)

    def value(self, key: str) -> Tensor:
        """The tensor with its scale applied: float32 where there is one."""
        if self.quantised_shape(key) is not None:
            return four_bit.unpack(self, key)
        if self.header[key].dtype == "I8":
            return int8.unpack(self, key)
        tensor = self.read(key)
        scale_key = self.scale_of(key) if self.header[key].dtype in FP8 else None
        if scale_key is None:
            return tensor
        scale = self.read(scale_key).float()
        if scale.numel() > 1:  # one factor for each output row
            scale = scale.reshape(-1, *[1] * (tensor.ndim - 1))
        return tensor.float() * scale

    def part(self, piece: Piece) -> Tensor:
        """A parameter's value."""
        return piece.cut(self.value(piece.key))

    def digest(self, keys: Iterable[str]) -> str:
        """A hash of names, shapes and bytes: the same weights in the same layout, wherever the file lies."""
        total = hashlib.blake2b(digest_size=16)
        for key in sorted(keys):
            info = self.header[key]
            total.update(json.dumps([key, info.dtype, info.shape]).encode())
            with self._files[key].open("rb") as file:
                file.seek(info.offset)
                for start in range(0, info.nbytes, HASH_CHUNK_BYTES):
                    total.update(file.read(min(HASH_CHUNK_BYTES, info.nbytes - start)))
        return total.hexdigest()
