"""A base kept as its GGUF file stores it: the blocks' bytes are the weights, unpacked for each use, forward and backward.

Unlike the other packings this one packs nothing: bytes come from the file (`set_packed`), so the base takes what the file
takes and training sees exactly the weights that llama.cpp runs. Embeddings stay packed too and unpack only the rows that
are looked up. Tensors that hold plain numbers become ordinary parameters unless
they are narrower than the wanted dtype.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import SourceError, t
from ..files.gguf_blocks import LAYOUTS, PLAIN, SUPPORTED, dequantize, row_bytes
from ..files.gguf_names import Place
from ..files.gguf_reader import GgufFile
from .assign import assign
from .packed import PackedLinear, Packing, _Packed
from .tracker import host_memory

NF4_BYTES = 0.52
"""A weight, double quantisation included."""


@dataclass(frozen=True)
class GgufBlocks(Packing):
    """One kind of ggml's blocks."""

    from_file: ClassVar[bool] = True
    kind: str

    @property
    def title(self) -> str:
        return self.kind.lower()

    def fits(self, layer: nn.Module) -> bool:
        width = layer.in_features if isinstance(layer, nn.Linear) else 0
        return width > 0 and (self.kind in PLAIN or width % LAYOUTS[self.kind].weights == 0)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Shapes alone: a real weight comes packed from its file."""
        assert weight.is_meta or isinstance(weight, FakeTensor), "GGUF blocks are read, not made"
        size = (len(weight), row_bytes(self.kind, weight.shape[1]))
        return {"blocks": torch.empty(size, dtype=torch.uint8, device=weight.device)}

    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return dequantize(packed[0], self.kind, dtype).view(shape)


@functools.cache
def packing_for(kind: str) -> GgufBlocks:
    assert kind in SUPPORTED, kind
    return GgufBlocks(kind)


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """Unpacks the rows that are looked up."""

    plain = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        (blocks,) = self.packed()
        rows = nn.functional.embedding(input.flatten(), blocks)
        shape = torch.Size([len(rows), self.weight_shape[1]])
        found = self.packing.unpack([rows], shape, self.weight_dtype).view(*input.shape, -1)
        scale = vars(self).get("scalar_embed_scale")  # Gemma's, rounded to the weights' dtype
        return found if scale is None else found * torch.full((), scale, dtype=found.dtype, device=found.device)


def pack_model(model: nn.Module, file: GgufFile, places: Mapping[str, Place], what: str = "modelo_base") -> None:
    """Swap, on meta and in the dtype they will have, the layers whose tensors stay packed.

    To be called before techniques convert the model: what is packed already, quantisers leave alone. SourceError for kinds
    that cannot stay packed.
    """
    refuse_unsupported(file, places, what)
    for name, place in places.items():
        path, _, leaf = name.rpartition(".")
        layer, kind = model.get_submodule(path), file.tensors[place.tensor].kind
        if leaf == "weight" and not place.shift and _packs(layer, kind):
            new = (PackedLinear if isinstance(layer, nn.Linear) else PackedEmbedding).of(layer, packing_for(kind))
            new._buffers.pop("embed_scale", None)
            new._non_persistent_buffers_set.discard("embed_scale")
            _replace(model, path, new)


def _packs(layer: nn.Module, kind: str) -> bool:
    scaled = "embed_scale" in layer._buffers
    known = isinstance(layer, nn.Embedding) and layer.max_norm is None and scaled == hasattr(layer, "scalar_embed_scale")
    if not (type(layer) is nn.Linear or known):
        return False
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return kind in LAYOUTS or PLAIN[kind].itemsize < weight.dtype.itemsize


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    """In its parent, and wherever a module refers to the layer beside the tree, as a tied head does."""
    parent, _, child = path.rpartition(".")
    old = model.get_submodule(path)
    setattr(model.get_submodule(parent), child, new)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if value is old:
                vars(module)[name] = new


def fill(
    model: nn.Module, file: GgufFile, places: Mapping[str, Place], device: torch.device, dtype: torch.dtype
) -> None:
    """Read all weights, in the order of the file, into a model on meta.

    What `pack_model` has swapped gets its bytes; any other layer gets values in `dtype`, through its `pack_weight` where it
    has one, so that a GGUF file can also be a base in nf4.
    """
    order = {tensor: number for number, tensor in enumerate(file.tensors)}
    for name in sorted(places, key=lambda name: order[places[name].tensor]):
        path, _, leaf = name.rpartition(".")
        layer, place = model.get_submodule(path), places[name]
        if leaf == "weight" and isinstance(layer, _Packed) and isinstance(layer.packing, GgufBlocks):
            with host_memory():
                raw = file.raw(place.tensor, place.part)
                raw = raw if place.order is None else raw[place.order]
            layer.set_packed({"blocks": raw}, getattr(layer, "home", device))
            if (stow := getattr(layer, "stow", None)) is not None:
                stow()
        else:
            with host_memory():
                value = read_values(file, place)
            assign(model, name, value, device, dtype)


def read_values(file: GgufFile, place: Place) -> Tensor:
    """A parameter in float32 on the CPU, from any kind that the `gguf` package can unpack."""
    info = file.tensors[place.tensor]
    raw = file.raw(place.tensor, place.part)
    if info.kind in SUPPORTED:
        values = dequantize(raw, info.kind, torch.float32)
    else:
        values = _unpacked_slowly(raw, info.kind, place.tensor)
    values = values.reshape(-1, *info.shape[-1:]) if len(info.shape) > 1 else values.flatten()
    values = values if place.order is None else values[place.order]
    return values + place.shift if place.shift else values


def _unpacked_slowly(raw: Tensor, kind: str, tensor: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as unpack

    try:
        return torch.from_numpy(unpack(raw.numpy(), GGMLQuantizationType[kind]))
    except (KeyError, NotImplementedError) as error:
        raise SourceError(
            t(pt=f"não sei desempacotar {tensor}, do tipo {kind}", en=f"{tensor}, of the kind {kind}, cannot be unpacked"),
            t(
                pt="atualize o pacote gguf, ou use um GGUF Q4_K_M, Q6_K ou Q8_0 do mesmo modelo",
                en="update the gguf package, or use a Q4_K_M, Q6_K or Q8_0 GGUF of the same model",
            ),
            "modelo_base",
        ) from error


def refuse_unsupported(file: GgufFile, places: Mapping[str, Place], what: str = "modelo_base") -> None:
    """One SourceError for all tensors that cannot stay packed."""
    wrong = sorted({place.tensor for place in places.values()} & set(_unsupported(file)))
    if not wrong:
        return
    kinds = ", ".join(unsupported_kinds(file, places))
    few = ", ".join(wrong[:3]) + (", …" if len(wrong) > 3 else "")
    raise SourceError(
        t(
            pt=f"{file.path.name}: {len(wrong)} tensores são de um tipo que não treino empacotado ({kinds}): {few}",
            en=f"{file.path.name}: {len(wrong)} tensors are of a kind that is not trained packed ({kinds}): {few}",
        ),
        t(
            pt="use um GGUF Q4_K_M, Q5_K_M, Q6_K ou Q8_0 do mesmo modelo",
            en="use a Q4_K_M, Q5_K_M, Q6_K or Q8_0 GGUF of the same model",
        ),
        what,
    )


def unsupported_kinds(file: GgufFile, places: Mapping[str, Place]) -> list[str]:
    """Of the tensors that the model takes, the formats that cannot stay packed."""
    wrong = {place.tensor for place in places.values()} & set(_unsupported(file))
    return sorted({file.tensors[name].kind for name in wrong})


def unpacked_notice(file: GgufFile, kinds: list[str]) -> str:
    """Such a file is trained on all the same, at the price of 16 bits a weight."""
    full = sum(prod(info.shape) for info in file.tensors.values()) * 2 / 2**30
    now, listed = file.data_bytes / 2**30, ", ".join(kinds)
    return t(
        pt=f"{file.path.name} tem tensores {listed}, que não treinam empacotados: o modelo é desempacotado em 16 bits "
        f"(~{full:.1f} GiB em vez de {now:.1f}); um Q4_K_M, Q5_K_M, Q6_K ou Q8_0 ficaria empacotado",
        en=f"{file.path.name} has {listed} tensors, which are not trained packed: the model is unpacked to 16 bits "
        f"(~{full:.1f} GiB instead of {now:.1f}); a Q4_K_M, Q5_K_M, Q6_K or Q8_0 would stay packed",
    )


def _unsupported(file: GgufFile) -> Iterator[str]:
    return (name for name, info in file.tensors.items() if info.kind not in SUPPORTED)
