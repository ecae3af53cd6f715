"""From tensors on disk to a module, one tensor at a time.

The module is built on `meta`; each of its parameters names the places where its value may lie in the files (`Piece`),
is read from there, scaled if it is stored in fp8, cast and moved. So host memory holds the component in the wanted
dtype and one tensor more, whatever the file's layout, sharding or dtype.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from ..errors import SourceError, t
from ..seam.family import Prepare
from . import stored
from .weights import Locate, Piece, Weights, bare


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
            with _Unfilled(torch.device("meta")):
                module = self.build(self.config)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._unbuildable(error) from error
        return module.eval().requires_grad_(False)

    def _unbuildable(self, error: Exception) -> SourceError:
        cause = f"{type(error).__name__}: {error}"
        return SourceError.said(
            pt=f"{self.name}: com as medidas do modelo base não se monta uma rede ({cause})",
            en=f"{self.name}: the base's sizes make no network ({cause})",
            hint_pt="o config.json ou o arquivo está estragado ou é de outra arquitetura: baixe-o de novo",
            hint_en="the config.json or the file is damaged or of another architecture: download it again",
            where=self.what,
        )

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Host memory that `load` needs, but for one tensor."""
        if self.as_stored and self.has_weights:
            kept = (self.weights.header[key] for key in self.used_keys())
            wide = ((info, prod(info.shape) * dtype.itemsize) for info in kept)
            return sum(nbytes if info.dtype == "I8" else min(info.nbytes, nbytes) for info, nbytes in wide)
        return sum(value.numel() for value in self.skeleton().state_dict().values()) * dtype.itemsize

    @property
    def has_weights(self) -> bool:
        """False where only the architecture is known, for planning."""
        return bool(self.weights.header)

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """Where each parameter lies, by name. SourceError when one is missing or of another shape."""
        return find_pieces(self, self.skeleton())

    def used_keys(self) -> set[str]:
        """Keys of the file that `load` reads. SourceError when one is missing or of another shape."""
        if not self.has_weights:
            return set()
        keys = {piece.key for piece in self.pieces.values()}
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

        def dtype_of(name: str) -> torch.dtype:
            return torch.float32 if self.stays_float32(name, dtype) else dtype

        stored.fill(module, self.weights, pieces, device, dtype_of)
        _fill_position_ids(module, device)
        assert not any(x.is_meta for x in (*module.parameters(), *module.buffers())), "a tensor was left on meta"


class _Unfilled(DeviceContext):
    """`with device:` without filling new weights: on meta there is nothing to fill, but PyTorch takes as long as for the rest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLING:
            return (kwargs or {})["tensor"]
        return super().__torch_function__(func, types, args, kwargs)


_FILLING = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_)


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
    model = nn.ModuleDict({name: components[name].skeleton() for name in names})
    reads = device.type != "meta"
    pieces = {name: components[name].pieces for name in model if reads or components[name].has_weights}
    nn.Module.to(model, dtype)  # not diffusers' own `to`, which warns of nothing
    for name, module in model.items():
        for path, layer in module.named_modules():
            if components[name].stays_float32(path, dtype):
                nn.Module.to(layer, torch.float32)
    for turn, (name, found) in enumerate(pieces.items()):
        if not reads:
            header = components[name].weights.header
            stored.note_order(model[name], {path: header[piece.key].offset for path, piece in found.items()}, turn)
        if components[name].as_stored:
            stored.pack_layers_as_stored(model[name], components[name].weights, found)
    if prepare is not None:
        prepare(model)
    if reads:
        for name, module in model.items():
            components[name].fill(module, pieces[name], device, dtype)
    return model.eval()


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
        elif bare(piece.shape(component.weights.shape(piece.key))) != bare(tuple(parameter.shape)):
            misshapen.append(f"{piece.key} {list(info.shape)} ≠ {list(parameter.shape)}")
        found[name] = piece
    if missing or misshapen or unreadable:
        raise _incomplete(component, missing, misshapen, unreadable)
    return found


def _incomplete(component: Component, missing: list[str], misshapen: list[str], unreadable: list[str]) -> SourceError:
    def few(names: Collection[str]) -> str:
        listed = ", ".join(sorted(names)[:4])
        return listed + (t(pt=f" e mais {len(names) - 4}", en=f" and {len(names) - 4} more") if len(names) > 4 else "")

    kinds = [
        (missing, t(pt="faltam {} tensores ({})", en="{} tensors are missing ({})")),
        (misshapen, t(pt="{} têm outro formato ({})", en="{} have another shape ({})")),
        (unreadable, t(pt="{} estão quantizados ({})", en="{} are quantised ({})")),
    ]
    named = [(set(names), text) for names, text in kinds if names]  # parts of one tensor are named alike
    problems = [text.format(len(names), few(names)) for names, text in named]
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


def _fill_position_ids(module: nn.Module, device: torch.device) -> None:
    """CLIP's only buffer is not in any file: 0, 1, 2, …"""
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta and name.endswith("position_ids"):
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.register_buffer("position_ids", torch.arange(buffer.shape[-1], device=device)[None], persistent=False)
