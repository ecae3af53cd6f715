"""FakeTensorMode, several times quicker for what a training step does over and over.

A step of SDXL is fifty thousand operators, nearly all of them repetitions: seventy equal transformer blocks. PyTorch's
own cache of fake results spends most of its time on keys made for symbolic shapes. Here the key is what decides a
result on plain strided tensors (operator, shapes, strides, dtypes, devices, arguments); an operator that is not known yet, or
whose result is not a fresh tensor or a view, takes PyTorch's way. In-place arithmetic gives its first argument back.

Some optimizers (Prodigy) look at a value and go on by it. Fakes have none; they are told 1, or False: no zero was divided by.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten
IN_PLACE = frozenset(
    {
        aten.add_.Tensor,
        aten.add_.Scalar,
        aten.addcdiv_.default,
        aten.addcmul_.default,
        aten.clamp_.default,
        aten.clamp_min_.default,
        aten.copy_.default,
        aten.div_.Tensor,
        aten.exp_.default,
        aten.fill_.Scalar,
        aten.lerp_.Scalar,
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.round_.default,
        aten.sqrt_.default,
        aten.sub_.Tensor,
        aten.zero_.default,
    }
)
"""They change values, which fakes have not, and no shape."""
SCALED = frozenset({aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor})
"""Of a Python number only its type matters to what they give back. Tiles are blended row by row, each by a number of its own."""
_DEVICE = torch.ops.prim.device.default
_ITEM = aten._local_scalar_dense.default
_COUNT = aten.add_.Tensor
_SELECT = aten.select.int


class _NotKeyed(Exception):
    """The result depends on more than shapes."""


@dataclass(frozen=True)
class _Result:
    """What to make: a tensor of its own, or a view of the first argument's storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_view: bool
    offset: int


class QuickFakeMode(FakeTensorMode):
    """To be entered as FakeTensorMode; what is made in it belongs to it."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._known: dict[Any, Any] = {}
        """By key: a _Result, several, or None for what must be asked each time."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Of every fake tensor on a device; PyTorch's constructor works them out anew for each."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or each call passes through torch.compile's switches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func in IN_PLACE and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return args[0]
        if func is _ITEM and isinstance(args[0], FakeTensor):
            return _told(args[0].dtype) if args[0].constant is None else args[0].constant.item()
        if func is _COUNT and isinstance(args[0], FakeTensor) and args[0].constant is not None and not isinstance(args[1], Tensor):
            args[0].constant.add_(args[1])
            return args[0]
        if func is _SELECT and isinstance(args[0], FakeTensor):
            return self._select(*args)
        kwargs = kwargs or {}
        try:
            key: list[Any] = [func]
            self._add_to_key(key, args, valued=func not in SCALED)
            for name, value in kwargs.items():
                key.append(name)
                self._add_to_key(key, (value,))
            known = self._known.get(frozen := tuple(key))
        except (_NotKeyed, TypeError):  # the latter: an argument that cannot be hashed
            return self.dispatch(func, types, args, kwargs)
        if isinstance(known, _Result):
            return self._make(known, args)
        if known is not None:
            return tuple(one and self._make(one, args) for one in known)
        out = self.dispatch(func, types, args, kwargs)
        if frozen not in self._known:
            self._known[frozen] = self._describe(out, args)
        return out

    def _add_to_key(self, key: list[Any], values: Any, valued: bool = True) -> None:
        """`valued`: the result depends on the value of numbers."""
        for value in values:
            if isinstance(value, Tensor):
                if not isinstance(value, FakeTensor) or value.constant is not None or value.layout is not torch.strided:
                    raise _NotKeyed
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            elif isinstance(value, (list, tuple)):
                key.append(len(value))
                self._add_to_key(key, value)
            else:
                key += (type(value), value if valued else None)

    def _describe(self, out: Any, args: Any) -> tuple[_Result | None, ...] | _Result | None:
        """None where the result is neither new nor a view."""
        if isinstance(out, FakeTensor):
            return self._describe_one(out, args)
        if not isinstance(out, tuple):
            return None
        found = tuple(None if one is None else self._describe_one(one, args) for one in out)
        whole = all(made is not None or one is None for made, one in zip(found, out, strict=True))
        return found if whole and found else None

    def _describe_one(self, out: Any, args: Any) -> _Result | None:
        if not isinstance(out, FakeTensor) or out.constant is not None or out.layout is not torch.strided:
            return None
        if any(out is one for one in _tensors(args)):
            return None
        storage, offset = out.untyped_storage(), int(out.storage_offset())
        sources = {one.untyped_storage()._cdata for one in _tensors(args)}
        is_view = storage._cdata in sources
        if is_view:
            first = args[0] if args else None
            if not isinstance(first, Tensor) or first.untyped_storage()._cdata != storage._cdata:
                return None
        result = _Result(out.shape, out.stride(), out.dtype, out.fake_device, is_view, offset)
        if not is_view and (offset or self._make(result, args).untyped_storage().nbytes() != storage.nbytes()):
            return None
        return result

    def _make(self, result: _Result, args: Any) -> Tensor:
        if result.is_view:
            made = torch.empty(0, dtype=result.dtype, device="meta")
            made.set_(args[0].untyped_storage(), result.offset, result.shape, result.stride)
        else:
            made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        return self._fake(made, result.device)

    def _select(self, x: FakeTensor, dim: int, index: int) -> Tensor:
        shape, stride = list(x.shape), list(x.stride())
        offset = int(x.storage_offset()) + index % shape[dim] * stride[dim]
        del shape[dim], stride[dim]
        return self._make(_Result(torch.Size(shape), tuple(stride), x.dtype, x.fake_device, True, offset), (x,))

    def _fake(self, made: Tensor, device: torch.device) -> Tensor:
        """`FakeTensor(self, made, device)`."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, made, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        fake = Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(attributes)
        return fake


def _told(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _tensors(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
