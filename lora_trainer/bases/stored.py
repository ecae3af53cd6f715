"""Weights kept as their file stores them: fp8 (plain and scaled), ggml's blocks, bitsandbytes' 4 bits.

A layer whose matrix the file holds in few bits becomes a packed one on meta, and its bytes go into it unchanged: the base
takes what the file takes, and training sees exactly the weights that the file's other users run. Quantisers leave such a
layer alone, but for fp8, which nf4 halves. Everything else (norms, biases, convolutions, embeddings) is read as values.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.four_bit import BLOCK, FourBit
from ..engine.packed import PackedLinear, Packing, RowScaled, _Packed
from ..engine.packed_gguf import packing_for, read_values
from ..engine.tracker import host_memory
from ..files.gguf_blocks import LAYOUTS, PLAIN, SUPPORTED
from ..files.gguf_reader import GgufFile, open_gguf
from ..files.headers import TensorInfo
from .four_bit import absmax, quant_state
from .weights import DTYPES, FP8, Piece, Weights


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
        from ..files.gguf_names import Place

        return read_values(self.file, Place(key)).reshape(self.header[key].shape)


def gguf_header(file: GgufFile) -> dict[str, TensorInfo]:
    """The dtype is ggml's: "Q4_K", "F16", …"""
    return {name: TensorInfo(i.kind, i.shape, i.nbytes, i.offset) for name, i in file.tensors.items()}


def open_weights(path: Path, what: str) -> Weights:
    """Of a single file, whatever its format."""
    from ..files.gguf_reader import is_gguf

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
        return {"codes": weights.read(piece.key), "scale": absmax(weights, piece.key)}
    codes = weights.read(piece.key)
    scale_key = weights.scale_of(piece.key)
    scale = weights.read(scale_key).float().reshape(-1, 1) if scale_key else torch.ones(1, 1)
    rows = piece.cut(scale.expand(len(codes), 1))
    return {"codes": _own(piece.cut(codes.view(torch.uint8))).view(codes.dtype), "scale": _own(rows)}


def _own(tensor: Tensor) -> Tensor:
    """A part of a fused tensor would keep the whole alive."""
    return tensor.contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


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


