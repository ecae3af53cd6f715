"""Frozen layers whose weight is kept packed in few bits and unpacked for each use.

The packed tensors are plain buffers, looked up at every call: block streaming may swap them for views of its own, and
FakeTensorMode may fake them. Autograd keeps the packed tensors for the backward pass, never the unpacked weight, so
memory is saved without checkpointing too, and an overwritten buffer makes the backward pass raise. How a weight is
packed belongs to the technique (`Packing`). Left out: fused kernels, which multiply without unpacking; their sums differ
from those of the backward pass, and at the row counts of training they unpack as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..families._base import BlockGroup
from ..tracker import host_memory


class Packing(ABC):
    """A way to keep a weight: `pack` and `unpack` run on meta, fake and real tensors alike."""

    @abstractmethod
    def fits(self, layer: nn.Module) -> bool:
        """Whether this linear or convolution layer can be packed so."""

    @abstractmethod
    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Named tensors whose shapes depend on the weight's shape alone."""

    @abstractmethod
    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The weight again, from the tensors in the order of `pack`."""


class _Packed:
    """What packed layers share. Takes everything but the weight over from the layer it replaces."""

    packing: Packing
    packed_names: tuple[str, ...]
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    bias: Tensor | None
    _buffers: dict[str, Tensor | None]

    plain: ClassVar[type[nn.Module]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The plain layer: peft makes a convolution's LoRA matrices by calling the class of the base layer."""
        return cls.plain(*args, **kwargs)

    @classmethod
    def of(cls, layer: nn.Module, packing: Packing) -> nn.Module:
        """The packed layer that takes `layer`'s place, on meta."""
        weight = cast(Tensor, layer.weight)
        assert weight.is_meta, "layers are packed before their weights are read"
        self: Any = object.__new__(cls)
        nn.Module.__init__(self)
        self.__dict__.update(vars(layer))  # stride, padding, home, …
        self._parameters = {name: p for name, p in layer._parameters.items() if name != "weight"}
        self.packing, self.weight_shape, self.weight_dtype = packing, weight.shape, weight.dtype
        packed = packing.pack(weight.detach())
        self.packed_names = tuple(packed)
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)
        return cast(nn.Module, self)

    def packed(self) -> list[Tensor]:
        return [cast(Tensor, self._buffers[name]) for name in self.packed_names]

    @torch.no_grad()
    def pack_weight(self, weight: Tensor, home: torch.device) -> None:
        """Pack a weight where it lies, in the dtype it will be unpacked to, and keep the result on `home`."""
        fresh = self.packing.pack(weight.reshape(self.weight_shape))
        self.weight_dtype = weight.dtype
        with host_memory(home.type != weight.device.type):
            for name, old in zip(self.packed_names, self.packed(), strict=True):
                assert (fresh[name].shape, fresh[name].dtype) == (old.shape, old.dtype), f"{name} differs from meta's"
                self._buffers[name] = fresh[name].to(home)

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.packing.unpack(self.packed(), self.weight_shape, dtype or self.weight_dtype)

    @property
    def weight(self) -> Tensor:
        return _Weight(self)

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return cast(Tensor, _Frozen.apply(self, input.to(dtype), bias, *self.packed()))  # type: ignore[no-untyped-call]

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class PackedLinear(_Packed, nn.Linear):
    plain = nn.Linear

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        return gradient @ weight


class PackedConv2d(_Packed, nn.Conv2d):
    plain = nn.Conv2d

    def apply_weight(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(input, weight, bias)

    def input_gradient(self, shape: torch.Size, weight: Tensor, gradient: Tensor) -> Tensor:
        how = (self.stride, self.padding, self.dilation, self.groups)
        return torch.nn.grad.conv2d_input(shape, weight, gradient, *how)  # type: ignore[no-untyped-call, no-any-return]


class _Frozen(torch.autograd.Function):
    """A layer's output from its packed weight, which has no gradient; nor has its bias."""

    @staticmethod
    def forward(ctx: Any, layer: _Packed, input: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        ctx.layer, ctx.shape = layer, input.shape
        ctx.save_for_backward(*packed)
        return layer.apply_weight(input, layer.packing.unpack(packed, layer.weight_shape, input.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
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
        made = Tensor._make_wrapper_subclass(cls, layer.weight_shape, dtype=layer.weight_dtype, device=device)  # type: ignore[attr-defined]
        made.layer = layer
        return cast("_Weight", made)

    def __init__(self, layer: _Packed) -> None:
        """All is done in __new__, as tensors demand."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda weight: weight.layer.unpacked(), (args, kwargs or {}))
        return func(*args, **kwargs)


PACKED: dict[type[nn.Module], type[_Packed]] = {nn.Linear: PackedLinear, nn.Conv2d: PackedConv2d}


def pack_layers(groups: Sequence[BlockGroup], packing: Packing) -> None:
    """Swap the layers that fit, on meta, inside the blocks; embeddings, heads and what is packed already stay."""
    for parent, name, layer in _layers(groups):
        if type(layer) in PACKED and packing.fits(layer):
            setattr(parent, name, PACKED[type(layer)].of(layer, packing))


def packing_report(groups: Sequence[BlockGroup]) -> tuple[int, int]:
    """Linear and convolution layers inside the blocks: how many are packed, how many are not."""
    kept = [isinstance(layer, _Packed) for _, _, layer in _layers(groups)]
    return sum(kept), len(kept) - sum(kept)


def _layers(groups: Sequence[BlockGroup]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for group in groups:
        for block in group.blocks:
            for parent in block.modules():
                for name, child in list(parent.named_children()):
                    if isinstance(child, (nn.Linear, nn.Conv2d)):
                        yield parent, name, child


class RowScaled(Packing):
    """Eight bits a weight and one float32 factor a row (an output feature or channel): |row|'s largest -> `LARGEST`."""

    LARGEST: ClassVar[dict[torch.dtype, float]] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

    def __init__(self, storage: torch.dtype, kinds: tuple[type[nn.Module], ...]) -> None:
        self.storage, self.kinds = storage, kinds
        self.largest = self.LARGEST[storage]

    def fits(self, layer: nn.Module) -> bool:
        plain = not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and layer.padding != "same")
        return isinstance(layer, self.kinds) and plain

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.float()
        rest = tuple(range(1, weight.ndim))
        scale = values.abs().amax(rest, keepdim=True).div_(self.largest).clamp_min_(torch.finfo(torch.float32).tiny)
        values = values / scale
        if not self.storage.is_floating_point:
            values = values.round_()
        return {"codes": values.clamp_(-self.largest, self.largest).to(self.storage), "scale": scale}

    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes, scale = packed
        return codes.to(dtype).mul_(scale)
