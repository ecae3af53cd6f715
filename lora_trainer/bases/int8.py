"""ComfyUI's int8 matrices (`int8_tensorwise`), unpacked as they are read: codes times one factor a row, or one for all.

With `convrot` each row was turned before it was rounded, group by group, by a regular Hadamard matrix (ConvRot, 2025: the
Kronecker power of a 4 x 4 one, which is its own inverse), so that no weight stands out; it is turned back. What comes of it are
plain weights, which the base's own quantisation takes from there. Left out: keeping the codes, int4, nvfp4.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import t
from ..files.headers import Header

FORMAT = "int8_tensorwise"
GROUP = 256
_FOUR = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


class Tensors(Protocol):
    """What a reader of few bits needs of a file."""

    header: Header

    def read(self, key: str) -> Tensor: ...
    def note(self, key: str) -> dict[str, Any]: ...
    def scale_of(self, key: str) -> str | None: ...


def note_key(key: str) -> str:
    return f"{key.removesuffix('weight')}comfy_quant"


def note(weights: Tensors, key: str) -> dict[str, Any] | None:
    """What ComfyUI noted beside a matrix of int8; None where it is of another making."""
    if weights.header[key].dtype != "I8" or note_key(key) not in weights.header or weights.scale_of(key) is None:
        return None
    told = weights.note(note_key(key))
    return told if told.get("format") == FORMAT else None


def unpack(weights: Tensors, key: str) -> Tensor:
    """(rows, columns) float32."""
    told, scale_key = note(weights, key), weights.scale_of(key)
    assert told is not None
    assert scale_key is not None
    scale = weights.read(scale_key).float().reshape(-1, 1)
    value = weights.read(key).view(torch.int8).float() * scale
    if not told.get("convrot"):
        return value
    group = int(told.get("convrot_groupsize", GROUP))
    return (value.view(len(value), -1, group) @ _hadamard(group)).view(value.shape)


def _hadamard(size: int) -> Tensor:
    """Symmetric and orthogonal; `size` is a power of 4."""
    four = torch.tensor(_FOUR, dtype=torch.float32)
    whole = four
    while len(whole) < size:
        whole = torch.kron(whole, four)
    assert len(whole) == size, f"no rotation of {size} columns"
    return whole / size**0.5


def notice() -> str:
    return t(
        pt="o modelo base está em int8 no arquivo e é desempacotado: ocupa o mesmo que em 16 bits, a menos que "
        "memoria.quantizacao_base peça nf4 ou int8",
        en="the base is int8 in its file and is unpacked: it takes what 16 bits take, unless memory.base_quantization asks "
        "for nf4 or int8",
    )
