"""From tensors on disk to a module, one tensor at a time.

The module is built on `meta`; each of its parameters names the places where its value may lie in the files (`Piece`),
is read from there, scaled if it is stored in fp8, cast and moved. So host memory holds the component in the wanted
dtype and one tensor more, whatever the file's layout, sharding or dtype. Files are read, not mapped: a mapped file
keeps its pages in the process, cannot be replaced under Windows, and hands out views that torch refuses where a header
is not aligned. What a file stores in few bits may stay so (_stored.py), but for int8 (_int8.py).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import SourceError, t
from ..headers import Header, TensorInfo, read_header
from ..tracker import host_memory
from . import _int8
from ._base import Prepare

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
FP8 = ("F8_E4M3", "F8_E5M2")
HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Piece:
    """Where a parameter may lie: a key; of a fused tensor, which `third` or which `rows` (first, number); whether it is
    stored transposed, with its two halves of rows exchanged, or with the rows of each of `pairs` heads that rotate together
    side by side (llama.cpp) instead of half a head apart."""

    key: str
    third: int | None = None
    transposed: bool = False
    rows: tuple[int, int] | None = None
    swapped: bool = False
    pairs: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        number = self.span(stored[0])[1] if stored else 0
        shape = (number, *stored[1:]) if stored else stored
        return shape[::-1] if self.transposed else shape

    def span(self, stored_rows: int) -> tuple[int, int]:
        """First row, number of rows."""
        if self.third is not None:
            return self.third * (stored_rows // 3), stored_rows // 3
        if self.rows is not None:
            return self.rows[0], max(0, min(self.rows[1], stored_rows - self.rows[0]))
        return 0, stored_rows

    def cut(self, tensor: Tensor) -> Tensor:
        if self.third is not None or self.rows is not None:
            first, number = self.span(len(tensor))
            tensor = tensor[first : first + number]
        return self.ordered(tensor.T if self.transposed else tensor)

    def ordered(self, rows: Tensor) -> Tensor:
        if self.pairs:
            return rows.unflatten(0, (self.pairs, -1, 2)).transpose(1, 2).reshape(rows.shape)
        return rows.roll(len(rows) // 2, 0) if self.swapped else rows


Locate = Callable[[str], Sequence[Piece]]
"""A module's parameter name -> the pieces that may hold it, the likeliest first."""


class Weights:
    """Several .safetensors files seen as one dictionary."""

    def __init__(self, files: Mapping[Path, Header]) -> None:
        self._files = {name: path for path, header in files.items() for name in header}
        self.header: Header = {name: info for header in files.values() for name, info in header.items()}

    @classmethod
    def open(cls, files: Iterable[Path], what: str) -> "Weights":
        return cls({path: read_header(path, what)[0] for path in files})

    def __contains__(self, key: str) -> bool:
        return key in self.header

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the values, whatever they are stored as."""
        return self.quantised_shape(key) or self.header[key].shape

    def readable(self, key: str) -> bool:
        known = self.header[key].dtype in DTYPES or self.quantised_shape(key) is not None
        return known or _int8.note(self, key) is not None

    def companions(self, key: str) -> list[str]:
        """Keys that are read along with this one."""
        if _int8.note(self, key) is not None:
            return [_int8.note_key(key), *filter(None, [self.scale_of(key)])]
        scale = self.scale_of(key) if self.header[key].dtype in FP8 else None
        state = [name for name in self.header if name.startswith(f"{key}.")] if self.quantised_shape(key) else []
        return [scale] if scale else state

    def quantised_shape(self, key: str) -> tuple[int, ...] | None:
        """Of a matrix that bitsandbytes has packed into 4 bits; None for any other."""
        from ._stored import quant_state

        state = quant_state(self, key) if self.header[key].dtype == "U8" else None
        return None if state is None else tuple(state["shape"])

    def read(self, key: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        info = self.header[key]
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        if info.nbytes:
            self._read_into(self._files[key], info, raw)
        return raw.view(DTYPES.get(info.dtype, torch.uint8)).reshape(info.shape)

    def _read_into(self, path: Path, info: TensorInfo, raw: Tensor) -> None:
        with path.open("rb") as file:
            file.seek(info.offset)
            if file.readinto(raw.numpy().data) != info.nbytes:
                raise SourceError(
                    t(pt=f"{path} mudou enquanto era lido", en=f"{path} changed while it was being read"),
                    t(pt="comece de novo", en="start again"),
                )

    def scale_of(self, key: str) -> str | None:
        """The factor that belongs to an fp8 tensor, in the spellings of ComfyUI and others."""
        stem = key.removesuffix("weight")
        names = (f"{stem}scale_weight", f"{stem}weight_scale", f"{key}.scale_weight", f"{key}_scale")
        return next((name for name in names if name in self), None)

    def value(self, key: str) -> Tensor:
        """The tensor with its scale applied: float32 where there is one."""
        if self.quantised_shape(key) is not None:
            from ._stored import unpack_4bit

            return unpack_4bit(self, key)
        if self.header[key].dtype == "I8":
            return _int8.unpack(self, key)
        tensor = self.read(key)
        scale_key = self.scale_of(key) if self.header[key].dtype in FP8 else None
        if scale_key is None:
            return tensor
        scale = self.read(scale_key).float()
        if scale.numel() > 1:  # one factor for each output row
            scale = scale.reshape(-1, *[1] * (tensor.ndim - 1))
        return tensor.float() * scale

    def digest(self, keys: Iterable[str]) -> str:
        """A hash of names, shapes and bytes: the same weights in the same layout, wherever the file lies."""
        total = hashlib.blake2b(digest_size=16)
        for key in sorted(keys):
            info = self.header[key]
            total.update(json.dumps([key, info.dtype, info.shape]).encode())
            with self._files[key].open("rb") as file:
                file.seek(info.offset)
                for start in range(0, info.nbytes, HASH_CHUNK_BYTES):
                    total.update(file.read(min(HASH_CHUNK_BYTES, info.nbytes - start)))
        return total.hexdigest()


@dataclass(frozen=True)
class Component:
    """One network of a base: how to build it, and where each of its weights lies."""

    name: str
    """As diffusers names it: unet, vae, text_encoder, text_encoder_2."""
    config: dict[str, Any]
    build: Callable[[Mapping[str, Any]], nn.Module]
    weights: Weights = field(repr=False)
    locate: Locate = field(repr=False)
    what: str
    """The config key of its source, for messages."""
    as_stored: bool = False
    """What the file holds in few bits (fp8, GGUF, 4 bits) is kept so, unless a quantiser makes it smaller."""
    float32: tuple[str, ...] = ()
    """Parts of module names whose weights do not bear fp16."""

    def skeleton(self) -> nn.Module:
        """The module on `meta`, frozen. SourceError where its config makes no network."""
        try:
            with torch.device("meta"):
                module = self.build(self.config)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._unbuildable(error) from error
        return module.eval().requires_grad_(False)

    def _unbuildable(self, error: Exception) -> SourceError:
        cause = f"{type(error).__name__}: {error}"
        return SourceError(
            t(
                pt=f"{self.name}: com as medidas do modelo base não se monta uma rede ({cause})",
                en=f"{self.name}: the base's sizes make no network ({cause})",
            ),
            t(
                pt="o config.json ou o arquivo está estragado ou é de outra arquitetura: baixe-o de novo",
                en="the config.json or the file is damaged or of another architecture: download it again",
            ),
            self.what,
        )

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Host memory that `load` needs, but for one tensor."""
        if self.as_stored and self.has_weights:
            stored = (self.weights.header[key] for key in self.used_keys())
            wide = ((info, prod(info.shape) * dtype.itemsize) for info in stored)
            return sum(nbytes if info.dtype == "I8" else min(info.nbytes, nbytes) for info, nbytes in wide)
        return sum(value.numel() for value in self.skeleton().state_dict().values()) * dtype.itemsize

    @property
    def has_weights(self) -> bool:
        """False where only the architecture is known, for planning."""
        return bool(self.weights.header)

    def used_keys(self) -> set[str]:
        """Keys of the file that `load` reads. SourceError when one is missing or of another shape."""
        if not self.has_weights:
            return set()
        pieces = find_pieces(self, self.skeleton())
        keys = {piece.key for piece in pieces.values()}
        return keys | {name for key in keys for name in self.weights.companions(key)}

    def fingerprint(self) -> str:
        """Changes with any weight or with the architecture."""
        config = json.dumps(self.config, sort_keys=True, default=str)
        return hashlib.sha256((self.weights.digest(self.used_keys()) + config).encode()).hexdigest()

    def load(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The module with its weights, frozen, in evaluation mode; on "meta" without weights."""
        return load_all({self.name: self}, [self.name], device, dtype)[self.name]

    def stays_float32(self, name: str, dtype: torch.dtype) -> bool:
        return dtype is torch.float16 and any(part in self.float32 for part in name.split("."))

    def fill(self, module: nn.Module, pieces: Mapping[str, Piece], device: torch.device, dtype: torch.dtype) -> None:
        """Read every weight into a skeleton, in the order of the file."""
        from . import _stored

        places = self.weights.header
        for name in sorted(pieces, key=lambda name: places[pieces[name].key].offset):
            owner, piece = module.get_submodule(name.rpartition(".")[0]), pieces[name]
            if name.endswith(".weight") and getattr(owner, "as_stored", False):
                _stored.fill_layer(cast(Any, owner), self.weights, piece, device)
                continue
            with host_memory():
                tensor = piece.cut(self.weights.value(piece.key))
            _assign(module, name, tensor, device, torch.float32 if self.stays_float32(name, dtype) else dtype)
        _fill_position_ids(module, device)
        assert not any(x.is_meta for x in (*module.parameters(), *module.buffers())), "a tensor was left on meta"


def load_all(
    components: Mapping[str, Component],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    prepare: Prepare | None = None,
) -> nn.ModuleDict:
    """Some components, frozen and in evaluation mode; on "meta" without weights.

    `prepare` may change the modules on meta before weights are read. A layer with a `pack_weight(tensor)` method
    gets each weight through it; one with a `home` device gets its weights there instead of on `device`.
    """
    from . import _stored

    model = nn.ModuleDict({name: components[name].skeleton() for name in names})
    reads = device.type != "meta"
    known = {name: module for name, module in model.items() if reads or components[name].has_weights}
    pieces = {name: find_pieces(components[name], module) for name, module in known.items()}
    nn.Module.to(model, dtype)  # not diffusers' own `to`, which warns of nothing
    for name, module in model.items():
        for path, layer in module.named_modules():
            if components[name].stays_float32(path, dtype):
                nn.Module.to(layer, torch.float32)
    for turn, (name, found) in enumerate(pieces.items()):
        if not reads:
            _note_order(model[name], components[name].weights, found, turn)
        if components[name].as_stored:
            _stored.pack_layers_as_stored(model[name], components[name].weights, found)
    if prepare is not None:
        prepare(model)
    if reads:
        for name, module in model.items():
            components[name].fill(module, pieces[name], device, dtype)
    return model.eval()


def _note_order(module: nn.Module, weights: Weights, pieces: Mapping[str, Piece], turn: int) -> None:
    """Tell each layer when `fill` would read its weights: what loading needs at its peak depends on the order."""
    for parameter, piece in pieces.items():
        owner: Any = module.get_submodule(parameter.rpartition(".")[0])
        owner.read_at = max((turn, weights.header[piece.key].offset), getattr(owner, "read_at", (0, 0)))


def find_pieces(component: Component, module: nn.Module) -> dict[str, Piece]:
    """Where each parameter lies; SourceError naming a few of those that are missing or of the wrong shape."""
    found: dict[str, Piece] = {}
    missing, misshapen, unreadable = [], [], []
    for name, parameter in module.state_dict().items():
        piece = next((p for p in component.locate(name) if p.key in component.weights), None)
        if piece is None:
            missing.append(component.locate(name)[0].key)
            continue
        info = component.weights.header[piece.key]
        if not component.weights.readable(piece.key):
            unreadable.append(f"{piece.key} ({info.dtype})")
        elif _bare(piece.shape(component.weights.shape(piece.key))) != _bare(tuple(parameter.shape)):
            misshapen.append(f"{piece.key} {list(info.shape)} ≠ {list(parameter.shape)}")
        found[name] = piece
    if missing or misshapen or unreadable:
        raise _incomplete(component, missing, misshapen, unreadable)
    return found


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without ones: a 1x1 convolution and a linear layer hold the same matrix, a kernel one frame deep is one of two
    dimensions, and GGUF may drop the first."""
    return tuple(side for side in shape if side != 1)


def _incomplete(component: Component, missing: list[str], misshapen: list[str], unreadable: list[str]) -> SourceError:
    def few(names: Collection[str]) -> str:
        listed = ", ".join(sorted(names)[:4])
        return listed + (t(pt=f" e mais {len(names) - 4}", en=f" and {len(names) - 4} more") if len(names) > 4 else "")

    problems = []
    missing, misshapen, unreadable = (list(dict.fromkeys(names)) for names in (missing, misshapen, unreadable))  # parts of one
    if missing:
        problems.append(
            t(
                pt=f"faltam {len(missing)} tensores ({few(missing)})",
                en=f"{len(missing)} tensors are missing ({few(missing)})",
            )
        )
    if misshapen:
        problems.append(
            t(
                pt=f"{len(misshapen)} têm outro formato ({few(misshapen)})",
                en=f"{len(misshapen)} have another shape ({few(misshapen)})",
            )
        )
    if unreadable:
        problems.append(
            t(
                pt=f"{len(unreadable)} estão quantizados ({few(unreadable)})",
                en=f"{len(unreadable)} are quantised ({few(unreadable)})",
            )
        )
    hint = (
        t(pt="use o modelo em fp16, bf16, fp32 ou fp8", en="use the model in fp16, bf16, fp32 or fp8")
        if unreadable
        else t(
            pt="o arquivo é de outra arquitetura ou está incompleto: baixe-o de novo, ou dê em modelo.arquitetura a "
            "pasta com "
            "os config.json dele",
            en="the file is of another architecture or incomplete: download it again, or give in model.architecture "
            "the folder "
            "with its config.json files",
        )
    )
    return SourceError(f"{component.name}: {'; '.join(problems)}", hint, component.what)


def _assign(module: nn.Module, name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    path, _, leaf = name.rpartition(".")
    owner: Any = module.get_submodule(path)
    away, home = hasattr(owner, "home"), getattr(owner, "home", device)
    if leaf == "weight" and hasattr(owner, "pack_weight"):
        owner.pack_weight(tensor.to(device=device, dtype=dtype), home)
    else:
        old = getattr(owner, leaf)
        assert old.is_meta, f"{name} filled twice"
        with host_memory() if away or home != device else nullcontext():
            # A part of a fused tensor would keep the whole alive.
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            tensor = tensor.to(device=home, dtype=dtype, copy=not whole).reshape(old.shape).contiguous()
        if isinstance(old, nn.Parameter):
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)
    if hasattr(owner, "stow"):
        owner.stow()


def _fill_position_ids(module: nn.Module, device: torch.device) -> None:
    """CLIP's only buffer is not in any file: 0, 1, 2, …"""
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta and name.endswith("position_ids"):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.register_buffer("position_ids", torch.arange(buffer.shape[-1], device=device)[None], persistent=False)
