"""From ggml's blocks of few bits to weights, as tensor operations alone: they run on real, fake and meta tensors alike.

A row of a weight is a sequence of blocks: in each, codes of 2 to 8 bits and the factors they are multiplied by (ggml's
block_q4_0 … block_q6_K in ggml-common.h; dequantize_row_* in ggml-quants.c). All kinds are computed in float32 in the order
ggml computes, so the weights equal the `gguf` package's bit for bit; then they are cast. Left out: the IQ kinds, whose
codes index tables, and the ternary TQ kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Dequantize = Callable[[Tensor, Tensor], None]
"""From (N, bytes of a block) uint8 into (N, weights of a block) float32."""


@dataclass(frozen=True)
class Layout:
    """How many weights a block holds in how many bytes, and how they come out."""

    weights: int
    nbytes: int
    dequantize: Dequantize


PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds that hold the weights themselves."""


def _floats(blocks: Tensor, start: int) -> Tensor:
    """(N, 1) float32 from the float16 number at a byte of each block."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(codes: Tensor, out: Tensor) -> None:
    """(…, W) bytes -> (…, 2, W): the low halves, then the high ones."""
    out[..., 0, :] = codes & 15
    out[..., 1, :] = codes >> 4


def _bits(mask: Tensor, count: int, width: int = 1) -> Tensor:
    """(N, W) bytes -> (N, count, W): bits 0 … width-1 of each byte, then the next ones, …"""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=mask.device)
    return (mask[:, None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_floats(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_floats(blocks, 0)).add_(_floats(blocks, 2))


def _fifth_bits(mask: Tensor) -> Tensor:
    """(N, 4) bytes, one bit a weight -> (N, 32)"""
    return _bits(mask, 8).transpose(1, 2).reshape(-1, 32) << 4


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_floats(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_floats(blocks, 0)).add_(_floats(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_floats(blocks, 0))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 12) bytes -> two of (N, 8): 6 bits each (ggml's get_scale_min_k4)."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], 1)
    return scales, minima


def _scale_groups(blocks: Tensor, out: Tensor) -> None:
    """The end of Q4_K and Q5_K: 8 groups of 32 codes, each with a factor and a minimum that is subtracted."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.mul_((_floats(blocks, 0) * scales)[..., None]).sub_((_floats(blocks, 2) * minima)[..., None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 16:].unflatten(1, (4, 32)), out.view(-1, 4, 2, 32))
    _scale_groups(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 48:].unflatten(1, (4, 32)), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).add_(_bits(blocks[:, 16:48], 8) << 4)
    _scale_groups(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, :128].unflatten(1, (2, 64)), out.view(-1, 2, 2, 64))
    halves = blocks[:, 128:192].unflatten(1, (2, 32))
    high = _bits(halves.flatten(0, 1), 4, 2) << 4
    out.view(-1, 4, 32).add_(high).sub_(32)
    factors = _floats(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).mul_(factors[..., None])


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, :16]
    codes = blocks[:, 16:80].unflatten(1, (2, 32))
    out.view(-1, 4, 32).copy_(_bits(codes.flatten(0, 1), 4, 2))
    factors, minima = _floats(blocks, 80) * (scales & 15), _floats(blocks, 82) * (scales >> 4)
    out.view(-1, 16, 16).mul_(factors[..., None]).sub_(minima[..., None])


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    codes = blocks[:, 32:96].unflatten(1, (2, 32))
    out.view(-1, 4, 32).copy_(_bits(codes.flatten(0, 1), 4, 2))
    out.view(-1, 8, 32).sub_((_bits(blocks[:, :32], 8) ^ 1) << 2)
    packed = blocks[:, 96:108]
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    scales = (low | (_bits(packed[:, 8:], 4, 2).flatten(1) << 4)).to(torch.int8) - 32
    out.view(-1, 16, 16).mul_((_floats(blocks, 108) * scales)[..., None])


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout(32, 18, _q4_0),
    "Q4_1": Layout(32, 20, _q4_1),
    "Q5_0": Layout(32, 22, _q5_0),
    "Q5_1": Layout(32, 24, _q5_1),
    "Q8_0": Layout(32, 34, _q8_0),
    "Q2_K": Layout(256, 84, _q2_k),
    "Q3_K": Layout(256, 110, _q3_k),
    "Q4_K": Layout(256, 144, _q4_k),
    "Q5_K": Layout(256, 176, _q5_k),
    "Q6_K": Layout(256, 210, _q6_k),
}
SUPPORTED = frozenset(PLAIN) | frozenset(LAYOUTS)


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a row of so many weights, which must be whole blocks."""
    if kind in PLAIN:
        return columns * PLAIN[kind].itemsize
    layout = LAYOUTS[kind]
    assert columns % layout.weights == 0, f"{columns} weights are no whole {kind} blocks"
    return columns // layout.weights * layout.nbytes


AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Weights whose float32 values are held at a time: what a processor's cache holds; enough to keep a card busy."""


def dequantize(raw: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """(rows, bytes of a row) uint8 -> (rows, columns) in `dtype`, where `raw` lies."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind]).to(dtype)
    layout = LAYOUTS[kind]
    blocks = raw.reshape(-1, layout.nbytes)
    weights = torch.empty(len(blocks), layout.weights, dtype=dtype, device=raw.device)
    height = AT_ONCE.get(raw.device.type, 1 << 22) // layout.weights
    starts = range(0, len(blocks), height)
    if isinstance(raw, FakeTensor) or raw.is_meta:
        starts = starts[:1]  # the parts take the same memory one after the other, and have no values
    for at in starts:
        target = weights[at : at + height]
        values = target if dtype == torch.float32 else torch.empty_like(target, dtype=torch.float32)
        layout.dequantize(blocks[at : at + height], values)
        if values is not target:
            target.copy_(values)
    return weights.view(len(raw), -1)
