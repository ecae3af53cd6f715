"""Weights kept as their file stores them: fp8 (plain and scaled), ggml's blocks, bitsandbytes' 4 bits.

A layer whose matrix the file holds in few bits becomes a packed one on meta, and its bytes go into it unchanged: the base
takes what the file takes, and training sees exactly the weights that the file's other users run. Quantisers leave such a
layer alone, but for fp8, which nf4 halves. Everything else (norms, biases, convolutions, embeddings) is read as values.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..gguf.blocks import LAYOUTS, PLAIN, SUPPORTED
from ..gguf.reader import GgufFile, open_gguf
from ..headers import TensorInfo
from ..memory._packed import PackedLinear, Packing, RowScaled, _Packed
from ..memory.packed_gguf import packing_for, read_values
from ..memory.quantize_4bit import BLOCK, FourBit
from ..tracker import host_memory
from ._weights import DTYPES, FP8, Piece, Weights

QUANT_STATE = ".quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")


class GgufWeights(Weights):
    """A GGUF file seen as those of safetensors are."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.header = gguf_header(file)
        self._files = {name: info.path for name, info in file.tensors.items()}

    def readable(self, key: str) -> bool:
        return True  # kinds that cannot stay packed are unpacked as they are read

    def unpacked_kinds(self) -> list[str]:
        return sorted({info.dtype for info in self.header.values()} - SUPPORTED)

    def companions(self, key: str) -> list[str]:
        return []

    def quantised_shape(self, key: str) -> tuple[int, ...] | None:
        return None

    def value(self, key: str) -> Tensor:
        from ..gguf.names import Place

        return read_values(self.file, Place(key)).reshape(self.header[key].shape)


def gguf_header(file: GgufFile) -> dict[str, TensorInfo]:
    """The dtype is ggml's: "Q4_K", "F16", …"""
    return {name: TensorInfo(i.kind, i.shape, i.nbytes, i.offset) for name, i in file.tensors.items()}


def open_weights(path: Path, what: str) -> Weights:
    """Of a single file, whatever its format."""
    from ..gguf.reader import is_gguf

    return GgufWeights(open_gguf(path, what)) if is_gguf(path) else Weights.open([path], what)


# -- which layers stay as they are


def pack_layers_as_stored(module: nn.Module, weights: Weights, pieces: Mapping[str, Piece]) -> None:
    """Swap, on meta and in the dtype they will have, the linear layers that the file holds in few bits."""
    for name, piece in pieces.items():
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path) if leaf == "weight" else None
        if type(layer) is not nn.Linear or piece.transposed:
            continue
        packing = packing_of(weights, piece, layer)
        if packing is not None and packing.fits(layer):
            packed = PackedLinear.of(layer, packing)
            packed.as_stored = True  # type: ignore[assignment]
            if isinstance(packing, RowScaled):
                packed.may_shrink = True  # type: ignore[assignment]
            parent, _, child = path.rpartition(".")
            setattr(module.get_submodule(parent), child, packed)


def packing_of(weights: Weights, piece: Piece, layer: nn.Linear) -> Packing | None:
    """How the file holds a matrix; None where it holds plain numbers as wide as those wanted."""
    kind = weights.header[piece.key].dtype
    if isinstance(weights, GgufWeights):
        narrow = kind in PLAIN and PLAIN[kind].itemsize < layer.weight.dtype.itemsize
        return packing_for(kind) if kind in LAYOUTS or narrow else None
    if kind in FP8:
        return RowScaled(DTYPES[kind], (nn.Linear,))
    state = quant_state(weights, piece.key) if kind == "U8" else None
    return FourBit(state["quant_type"], double=False) if state and state["blocksize"] == BLOCK else None


def fill_layer(layer: Any, weights: Weights, piece: Piece, device: torch.device) -> None:
    """The bytes of one matrix, or the rows of it that are this layer's."""
    with host_memory():
        fresh = _stored(layer, weights, piece)
    layer.set_packed(fresh, getattr(layer, "home", device))
    if (stow := getattr(layer, "stow", None)) is not None:
        stow()


def _stored(layer: _Packed, weights: Weights, piece: Piece) -> dict[str, Tensor]:
    if isinstance(weights, GgufWeights):
        part = piece.span(weights.header[piece.key].shape[0])
        return {"blocks": piece.ordered(weights.file.raw(piece.key, part))}
    if isinstance(layer.packing, FourBit):
        return {"codes": weights.read(piece.key), "scale": _absmax(weights, piece.key)}
    codes = weights.read(piece.key)
    scale_key = weights.scale_of(piece.key)
    scale = weights.read(scale_key).float().reshape(-1, 1) if scale_key else torch.ones(1, 1)
    rows = piece.cut(scale.expand(len(codes), 1))
    return {"codes": _own(piece.cut(codes.view(torch.uint8))).view(codes.dtype), "scale": _own(rows)}


def _own(tensor: Tensor) -> Tensor:
    """A part of a fused tensor would keep the whole alive."""
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# -- bitsandbytes' 4 bits


def quant_state(weights: Weights, key: str) -> dict[str, Any] | None:
    """What bitsandbytes noted beside a matrix that it packed: quant_type, blocksize, shape, …"""
    known: dict[str, dict[str, Any] | None] = vars(weights).setdefault("_quant_states", {})
    if key not in known:
        names = [name for kind in KINDS if (name := f"{key}{QUANT_STATE}{kind}") in weights.header]
        known[key] = json.loads(bytes(weights.read(names[0]).tolist())) if names else None
    return known[key]


def _absmax(weights: Weights, key: str) -> Tensor:
    """(blocks,) float32: each block's largest weight, itself unpacked where it was quantised in turn."""
    import bitsandbytes  # noqa: F401  (brings the operators)

    absmax, state = weights.read(f"{key}.absmax"), quant_state(weights, key)
    assert state is not None
    if "nested_blocksize" not in state:
        return absmax.float()
    nested, code = (weights.read(f"{key}.{name}") for name in ("nested_absmax", "nested_quant_map"))
    unpack = torch.ops.bitsandbytes.dequantize_blockwise.default
    found: Tensor = unpack(absmax, nested, code, int(state["nested_blocksize"]), torch.float32)
    return found + float(state["nested_offset"])


def unpack_4bit(weights: Weights, key: str) -> Tensor:
    """float32 values."""
    state = quant_state(weights, key)
    assert state is not None
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default
    shape, size = torch.Size(state["shape"]), int(state["blocksize"])
    # on the CPU it gets matrices wrong whose rows end inside a block
    blocks = (shape.numel() // size, size) if shape.numel() % size == 0 else tuple(shape)
    value: Tensor = unpack(weights.read(key), _absmax(weights, key), size, state["quant_type"], blocks, torch.float32)
    return value.reshape(shape)


def stored_formats(weights: Weights, keys: Iterable[str]) -> set[str]:
    """Of the matrices in few bits, for people: "fp8", "nf4", "Q4_K", …"""
    found = set()
    for key in keys:
        kind = weights.header[key].dtype
        if kind in FP8:
            found.add("fp8")
        elif kind in LAYOUTS:
            found.add(kind)
        elif kind == "U8" and (state := quant_state(weights, key)):
            found.add(str(state["quant_type"]))
    return found


