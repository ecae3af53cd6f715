"""Matrices that bitsandbytes packed into 4 bits in a file: what it noted beside them, their factors, their values."""

from typing import Any

import torch
from torch import Tensor

from .int8 import Tensors

QUANT_STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")


def quant_state(weights: Tensors, key: str) -> dict[str, Any] | None:
    """What bitsandbytes noted beside a matrix that it packed: quant_type, blocksize, shape, …"""
    names = [name for kind in KINDS if (name := f"{key}{QUANT_STATE}{kind}") in weights.header]
    return weights.note(names[0]) if names else None


def absmax(weights: Tensors, key: str) -> Tensor:
    """(blocks,) float32: each block's largest weight, itself unpacked where it was quantised in turn."""
    import bitsandbytes  # noqa: F401  (brings the operators)

    found, state = weights.read(f"{key}.absmax"), quant_state(weights, key)
    assert state is not None
    if "nested_blocksize" not in state:
        return found.float()
    nested, code = (weights.read(f"{key}.{name}") for name in ("nested_absmax", "nested_quant_map"))
    dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
    values: Tensor = dequantize(found, nested, code, int(state["nested_blocksize"]), torch.float32)
    return values + float(state["nested_offset"])


def unpack(weights: Tensors, key: str) -> Tensor:
    """float32 values."""
    state = quant_state(weights, key)
    assert state is not None
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    shape, size = torch.Size(state["shape"]), int(state["blocksize"])
    # on the CPU it gets matrices wrong whose rows end inside a block
    blocks = (shape.numel() // size, size) if shape.numel() % size == 0 else tuple(shape)
    value: Tensor = dequantize(weights.read(key), absmax(weights, key), size, state["quant_type"], blocks, torch.float32)
    return value.reshape(shape)
