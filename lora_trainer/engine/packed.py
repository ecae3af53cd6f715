"""Frozen layers whose weight is kept packed in few bits and unpacked for each use.

The packed tensors are plain buffers, looked up at every call: block streaming may swap them for views of its own, and
FakeTensorMode may fake them. Autograd keeps the packed tensors for the backward pass, never the unpacked weight, so
memory is saved without checkpointing too, and an overwritten buffer makes the backward pass raise. How a weight is
packed belongs to the technique (`Packing`). Left out: fused kernels, which multiply without unpacking; their sums differ
from those of the backward pass, and at the row counts of training they unpack as well.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.grad import conv2d_input
from torch.utils._pytree import tree_map_only

from ..seam.family import BlockGroup
from .tracker import host_memory


class Packing(ABC):
    """A way to keep a weight: `pack` and `unpack` run on meta, fake and real tensors alike."""

    from_file: ClassVar[bool] = False
    """Weights come packed; nothing is packed here."""

    @property
    @abstractmethod
    def title(self) -> str:
        """For people: "nf4", "int8"."""

    @abstractmethod
    def fits(self, layer: nn.Module) -> bool:
        """Whether this linear or convolution layer can be packed so."""

    @abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Named tensors whose shapes depend on the weight's shape alone."""

    @abstractmethod
    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The weight again, from the tensors in the order of `pack`."""


class _Packed(nn.Module):
    """What packed layers share. One takes everything but the weight over from the layer it replaces."""

    plain: ClassVar[type[nn.Module]]
    packing: Packing
    packed_names: tuple[str, ...]
    weight_shape: torch.Size
    weight_dtype: torch.dtype

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The plain layer: peft makes a convolution's LoRA matrices by calling the class of the base layer."""
        return cls.plain(*args, **kwargs)

    @classmethod
    def of(cls, layer: nn.Module, packing: Packing) -> "_Packed":
        """The packed layer that takes `layer`'s place, on meta."""
        weight = cast(Tensor, layer.weight)
        assert weight.is_meta, "layers are packed before their weights are read"
        self = object.__new__(cls)
        nn.Module.__init__(self)
        self.__dict__.update(vars(layer))  # stride, padding, home, …
        self._parameters = {name: p for name, p in layer._parameters.items() if name != "weight"}
        self.packing, self.weight_shape, self.weight_dtype = packing, weight.shape, weight.dtype
        places = _places(packing, weight.shape, weight.dtype)
        self.packed_names = tuple(places)
        for name, place in places.items():
            self.register_buffer(name, torch.empty(place.shape, dtype=place.dtype, device="meta"), persistent=False)
        return self

    def packed(self) -> list[Tensor]:
        return [cast(Tensor, self._buffers[name]) for name in self.packed_names]

    @torch.no_grad()
    def pack_weight(self, weight: Tensor, home: torch.device) -> None:
        """Pack a weight where it lies, in the dtype it will be unpacked to, and keep the result on `home`."""
        self.weight_dtype = weight.dtype
        self.set_packed(self.packing.pack(weight.reshape(self.weight_shape)), home)

    @torch.no_grad()
    def set_packed(self, fresh: Mapping[str, Tensor], home: torch.device) -> None:
        """Keep tensors that are packed already, as `pack` would have made them, on `home`."""
        in_host = hasattr(self, "home")
        with host_memory() if in_host else nullcontext():
            for name, old in zip(self.packed_names, self.packed(), strict=True):
                assert (fresh[name].shape, fresh[name].dtype) == (old.shape, old.dtype), f"{name} differs from meta's"
                self._buffers[name] = fresh[name].to(home, copy=in_host)

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.packing.unpack(self.packed(), self.weight_shape, dtype or self.weight_dtype)

    @property
    def weight(self) -> Tensor:
        return _Weight(self)

    def forward(self, input: Tensor) -> Tensor:
        dtype, bias = _compute_dtype(input), self._parameters["bias"]
        bias_in_dtype = None if bias is None else bias.to(dtype)
        return cast(Tensor, _Frozen.apply(self, input.to(dtype), bias_in_dtype, *self.packed()))

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]
    plain = nn.Linear

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient @ weight


class PackedConv2d(_Packed, nn.Conv2d):  # type: ignore[override]
    plain = nn.Conv2d

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(input, weight, bias)

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        how = (self.stride, self.padding, self.dilation, self.groups)
        return cast(Tensor, conv2d_input(shape, weight, gradient, *how))


@functools.cache
def _places(packing: Packing, shape: torch.Size, dtype: torch.dtype) -> dict[str, Tensor]:
    """What `pack` makes, on meta. A model has hundreds of layers of few shapes."""
    with unset_fake_temporarily():
        return packing.pack(torch.empty(shape, dtype=dtype, device="meta"))


def _compute_dtype(input: Tensor) -> torch.dtype:
    kind = input.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else input.dtype


class _Frozen(torch.autograd.Function):
    """A layer's output from its packed weight, which has no gradient; nor has its bias."""

    @staticmethod
    def forward(ctx: Any, layer: _Packed, input: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        ctx.layer, ctx.shape = layer, input.shape
        ctx.save_for_backward(*packed)
        return layer.apply_weight(input, layer.packing.unpack(packed, layer.weight_shape, input.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.saved_tensors
        weight = ctx.layer.packing.unpack(packed, ctx.layer.weight_shape, gradient.dtype)
        return None, ctx.layer.input_gradient(ctx.shape, weight, gradient), None, *[None] * len(packed)


class _Weight(Tensor):
    """A packed layer's weight to those who ask (peft, transformers): its dtype, device and shape cost nothing; any
    operator unpacks it, so that it computes as the weight would."""

    layer: _Packed

    @staticmethod
    def __new__(cls, layer: _Packed) -> "_Weight":
        device = layer.packed()[0].device
        made = Tensor._make_wrapper_subclass(cls, layer.weight_shape, dtype=layer.weight_dtype, device=device)
        made.layer = layer
        return made

    def __init__(self, layer: _Packed) -> None:
        """All is done in __new__, as tensors demand."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda weight: weight.layer.unpacked(), (args, kwargs or {}))
        return func(*args, **kwargs)


PACKED: dict[type[nn.Module], type[_Packed]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv2d}


def pack_layers(groups: Sequence[BlockGroup], packing: Packing) -> None:
    """Swap the layers that fit, on meta, inside the blocks; embeddings, heads and what is packed already stay.

    What is packed because its file is stays too, but for fp8 (`may_shrink`), which is packed anew where that makes it smaller.
    """
    for parent, name, layer in _layers(groups):
        if type(layer) in PACKED and packing.fits(layer):
            setattr(parent, name, PACKED[type(layer)].of(layer, packing))
        elif isinstance(layer, _Packed) and hasattr(layer, "may_shrink") and _is_smaller(layer, packing):
            setattr(parent, name, _repacked(layer, packing))


def _is_smaller(layer: _Packed, packing: Packing) -> bool:
    """Whether another format would take less than the one that the file came in."""
    other = packing.fits(layer) and layer.packing.title != packing.title
    return other and _size(layer, packing) < _size(layer, layer.packing)


def _size(layer: _Packed, packing: Packing) -> int:
    return sum(place.nbytes for place in _places(packing, layer.weight_shape, layer.weight_dtype).values())


def _repacked(layer: _Packed, packing: Packing) -> _Packed:
    plain = nn.Linear(layer.weight_shape[1], layer.weight_shape[0], False, device="meta", dtype=layer.weight_dtype)
    plain.requires_grad_(False)
    plain._parameters["bias"] = layer._parameters["bias"]
    plain.__dict__.update({k: v for k, v in vars(layer).items() if k in ("read_at", "home", "stow")})
    return PackedLinear.of(plain, packing)


def packing_report(groups: Sequence[BlockGroup]) -> tuple[int, int]:
    """Linear and convolution layers inside the blocks: how many are packed, how many are not."""
    kept = [isinstance(layer, _Packed) for _, _, layer in _layers(groups)]
    return sum(kept), len(kept) - sum(kept)


def _layers(groups: Sequence[BlockGroup]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for group in groups:
        for block in () if group.exact else group.blocks:
            for parent in block.modules():
                for name, child in list(parent.named_children()):
                    if isinstance(child, (nn.Linear, nn.Conv2d)):
                        yield parent, name, child


AT_ONCE = 1 << 22
"""Weights."""


@dataclass(frozen=True)
class RowScaled(Packing):
    """Eight bits a weight, and one float32 factor a row (an output feature or channel) that brings its largest weight
    to the format's."""

    storage: torch.dtype
    kinds: tuple[type[nn.Module], ...]
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or ("int8" if self.storage is torch.int8 else "fp8")

    @property
    def largest(self) -> float:
        info = torch.finfo if self.storage.is_floating_point else torch.iinfo
        return float(info(self.storage).max)

    def fits(self, layer: nn.Module) -> bool:
        plain = not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and layer.padding != "same")
        return isinstance(layer, self.kinds) and plain

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Some rows at a time: a float32 copy of the whole weight could be the peak of a run."""
        codes = torch.empty(weight.shape, dtype=self.storage, device=weight.device)
        height = max(1, AT_ONCE // weight[0].numel())
        scales = [
            self._pack_rows(weight[at : at + height], codes[at : at + height]) for at in range(0, len(weight), height)
        ]
        return {"codes": codes, "scale": torch.cat(scales)}

    def _pack_rows(self, rows: Tensor, codes: Tensor) -> Tensor:
        largest, dims = self.largest, tuple(range(1, rows.ndim))
        scale = torch.linalg.vector_norm(rows, torch.inf, dims, keepdim=True, dtype=torch.float32) / largest
        scale.clamp_min_(torch.finfo(torch.float32).tiny)
        values = rows / scale
        if not self.storage.is_floating_point:
            values.round_()
        codes.copy_(values.clamp_(-largest, largest))
        return scale

    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes, scale = packed
        return codes.to(dtype).mul_(scale)
