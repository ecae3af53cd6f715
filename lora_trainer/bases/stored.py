"""Weights kept as their file stores them: fp8 (plain and scaled), ggml's blocks, bitsandbytes' 4 bits.

A layer whose matrix the file holds in few bits becomes a packed one on meta, and its bytes go into it unchanged: the base
takes what the file takes, and training sees exactly the weights that the file's other users run. Quantisers leave such a
layer alone, but for fp8, which nf4 halves. Everything else (norms, biases, convolutions, embeddings) is read as values.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..engine.assign import assign
from ..engine.four_bit import BLOCK, FourBit
from ..engine.packed import PackedLinear, Packing, RowScaled, _Packed
from ..engine.packed_gguf import GgufBlocks, PackedEmbedding, unpacks_rows
from ..engine.tracker import host_memory
from ..files.gguf_blocks import LAYOUTS, PLAIN
from ..files.sources import Source
from .four_bit import absmax, quant_state
from .gguf import GgufWeights
from .weights import DTYPES, FP8, Piece, Weights

DtypeOf = Callable[[str], torch.dtype]
"""Parameter -> the dtype that its values take."""


def open_weights(source: Source, sub: str = "") -> Weights:
    """Of a single file, whatever its format, or of a folder's component."""
    if source.gguf is not None:
        return GgufWeights(source.gguf)
    if source.kind == "file":
        return Weights({source.path: source.header})
    return Weights.open(source.weight_files(sub), source.what)


# -- which layers stay as they are


def pack_layers_as_stored(
    module: nn.Module, weights: Weights, pieces: Mapping[str, Piece], *, embeddings: bool = False
) -> None:
    """Swap, on meta and in the dtype they will have, the linear layers that the file holds in few bits; also embeddings that
    are told to. What is packed so, quantisers leave alone."""
    for name, piece in pieces.items():
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path) if leaf == "weight" else None
        linear = type(layer) is nn.Linear
        if not (linear or (embeddings and unpacks_rows(layer))) or piece.transposed or piece.shift:
            continue
        assert layer is not None
        packing = packing_of(weights, piece, layer)
        if packing is not None and packing.fits(layer):
            packed = PackedLinear.of(layer, packing) if linear else PackedEmbedding.of(layer, packing)
            packed.as_stored = True  # type: ignore[assignment]
            if isinstance(packing, RowScaled):
                packed.may_shrink = True  # type: ignore[assignment]
            parent, _, child = path.rpartition(".")
            setattr(module.get_submodule(parent), child, packed)
            if not linear:
                _refer_to(packed, layer, module)


def _refer_to(new: nn.Module, old: nn.Module, model: nn.Module) -> None:
    """Wherever a module refers to a layer beside the tree, as a tied head does to the embeddings."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is old:
                vars(module)[name] = new


def packing_of(weights: Weights, piece: Piece, layer: Any) -> Packing | None:
    """How the file holds a matrix; None where it holds plain numbers as wide as those wanted."""
    kind = weights.header[piece.key].dtype
    if isinstance(weights, GgufWeights):
        narrow = kind in PLAIN and PLAIN[kind].itemsize < layer.weight.dtype.itemsize
        return GgufBlocks(kind) if kind in LAYOUTS or narrow else None
    if kind in FP8:
        return RowScaled(DTYPES[kind], (nn.Linear,))
    state = quant_state(weights, piece.key) if kind == "U8" else None
    return FourBit(state["quant_type"], double=False) if state and state["blocksize"] == BLOCK else None


def note_order(module: nn.Module, order: Mapping[str, int], turn: int = 0) -> None:
    """Tell each layer when `fill` will read its parameters: what loading needs at its peak depends on the order."""
    for name, at in order.items():
        owner: Any = module.get_submodule(name.rpartition(".")[0])
        owner.read_at = max((turn, at), getattr(owner, "read_at", (0, 0)))


def fill(
    module: nn.Module, weights: Weights, pieces: Mapping[str, Piece], device: torch.device, dtype_of: DtypeOf
) -> None:
    """Read every weight into a module on meta, in the order of the file: bytes where a layer is packed as the file has it, else
    values, through the layer's `pack_weight` where it has one."""
    for name in sorted(pieces, key=lambda name: weights.header[pieces[name].key].offset):
        owner, piece = module.get_submodule(name.rpartition(".")[0]), pieces[name]
        if name.endswith(".weight") and getattr(owner, "as_stored", False):
            _fill_layer(cast(Any, owner), weights, piece, device)
            continue
        with host_memory():
            tensor = weights.part(piece)
        assign(module, name, tensor, device, dtype_of(name))


def _fill_layer(layer: Any, weights: Weights, piece: Piece, device: torch.device) -> None:
    """The bytes of one matrix, or the rows of it that are this layer's."""
    with host_memory():
        fresh = _stored(layer, weights, piece)
    layer.set_packed(fresh, getattr(layer, "home", device))
    if (stow := getattr(layer, "stow", None)) is not None:
        stow()


def _stored(layer: _Packed, weights: Weights, piece: Piece) -> dict[str, Tensor]:
    if isinstance(weights, GgufWeights):
        return {"blocks": weights.blocks(piece)}
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


