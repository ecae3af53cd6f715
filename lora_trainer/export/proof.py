"""What every proof of a saved file stands on: the trained layers lifted out, the file's put in, outputs compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import diffusers as diffusers_library
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import DivergedError, MachineError, t
from ..layouts.lora import Lora, LoraModule
from ..layouts.lycoris import Lycoris
from ..layouts.read import read_tensors

FILE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""By the file's dtype: ‖ΔW in the file - ΔW live‖ / ‖ΔW live‖ of the worst module."""
OUTPUT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By the dtype the loader computes in: largest difference of outputs / largest output."""


@dataclass(frozen=True)
class Verification:
    """Facts of a file that passed. Differences are relative, of what the consumer's loader made of the file:
    `output_difference` to the trainer's output, `effect` to the base's."""

    path: Path
    num_modules: int
    delta_difference: float
    output_difference: float
    effect: float
    reader: str
    notice: str = ""


def no_effect_notice() -> str:
    return t(pt="o LoRA não muda a saída do modelo", en="the LoRA does not change the model's output")


def stored_dtype(path: Path) -> torch.dtype:
    """Of the file's matrices, all found finite."""
    stored, _ = read_tensors(path, path.name)
    bad = sorted(key for key, tensor in stored.items() if not bool(tensor.float().isfinite().all()))
    if bad:
        raise DivergedError(
            t(pt=f"o arquivo tem NaN ou infinito ({bad[0]})", en=f"the file has NaN or infinity ({bad[0]})"),
            where=str(path),
        )
    return next(tensor.dtype for tensor in stored.values() if tensor.ndim > 1)


@torch.no_grad()
def check_consumer(model: nn.ModuleDict, lora: Lora, path: Path) -> torch.dtype:
    """Every module was loaded with the file's effect; returns the dtype its weights were loaded in."""
    loaded = _layers(model)
    require(loaded.keys() == lora.keys(), path, f"diffusers: {len(loaded)} / {len(lora)}")
    dtype = torch.float32
    for name, layer in loaded.items():
        (key,) = layer.lora_A.keys()
        dtype = layer.lora_A[key].weight.dtype
        with host_memory():
            down, up = (matrix[key].weight.to("cpu", torch.float32) for matrix in (layer.lora_A, layer.lora_B))
            got = float(layer.scaling[key]) * (up.flatten(1) @ down.flatten(1))
            difference = relative(got, lora[name].delta())
        require(difference <= FILE_TOLERANCE[dtype], path, f"diffusers, {name}: {difference:.2e}")
    return dtype


@contextmanager
def lifted_out(model: nn.ModuleDict, adapter: Adapter) -> Iterator[None]:
    """Inside, the model is the bare base; whatever else was put on it meanwhile is gone afterwards."""
    ours = {id(layer): layer for layer in adapter.layers.values()}
    places = [(parent, name, child) for parent, name, child in _children(model) if id(child) in ours]
    before = {part: set(vars(module)) for part, module in model.items()}
    for parent, name, layer in places:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, child in _children(model):
            if isinstance(child, BaseTunerLayer):
                setattr(parent, name, child.base_layer)
        for parent, name, layer in places:
            setattr(parent, name, layer)
        for part, module in model.items():
            for attribute in set(vars(module)) - before[part]:
                delattr(module, attribute)
            if getattr(module, "_hf_peft_config_loaded", False):
                setattr(module, "_hf_peft_config_loaded", False)  # noqa: B010  (mypy reads modules' attributes as tensors)
        model.requires_grad_(False)
        for parameter in adapter.named_parameters().values():
            parameter.requires_grad_(True)


@contextmanager
def rounded(adapter: Adapter, lora: Lora | Lycoris, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the live adapter holds the file's values in `dtype`; afterwards its own storages again."""
    tensors = adapter.named_tensors()
    state, own = adapter.state_of(lora), {key: tensor.data for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        tensor.data = state[key].to(tensor.device, dtype)
    try:
        yield
    finally:
        for key, tensor in tensors.items():
            tensor.data = own[key]


@contextmanager
def quiet_probe(model: nn.ModuleDict, adapter: Adapter) -> Iterator[None]:
    """No dropout in the adapter; the loader's switches of train and eval mode are undone."""
    modes = [(module, module.training) for module in model.modules()]
    for layer in adapter.layers.values():
        layer.lora_dropout.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _layers(model: nn.ModuleDict) -> dict[str, LoraLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def delta_difference(stored: LoraModule, live: LoraModule) -> float:
    pairs = [(stored.delta(), live.delta())]
    if stored.magnitude is not None and live.magnitude is not None:
        pairs.append((stored.magnitude, live.magnitude))
    return max(relative_norm(a, b) for a, b in pairs)


def relative_norm(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def require(condition: bool, path: Path, what: str) -> None:
    if not condition:
        raise MachineError(
            t(
                pt=f"o arquivo foi gravado, mas lido de volta não é o LoRA treinado ({what})",
                en=f"the file was written, but read back it is not the LoRA that was trained ({what})",
            ),
            t(
                pt=f"não use este arquivo; relate o erro (diffusers {diffusers_library.__version__})",
                en=f"do not use this file; report the error (diffusers {diffusers_library.__version__})",
            ),
            str(path),
        )
