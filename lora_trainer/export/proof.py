"""Proof that a saved file works: re-read, put by its reader onto the very model that was trained, outputs compared.

One routine for every kind of file; who puts it onto the model differs (verify.py, peft_folder.py). The trainer's layers are
lifted out, so that no second copy of the base is needed, and put back at the end with their exact weights. Outputs are compared
with the live adapter rounded as the file is; what the rounding itself cost is measured apart, as the change of each module's
delta W.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as diffusers_library
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import DivergedError, MachineError, t
from ..layouts.differences import differences
from ..layouts.lora import Lora
from ..layouts.peft import WEIGHTS
from ..layouts.read import read_tensors
from ..layouts.table import Modules

FILE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""By the file's dtype: ‖ΔW in the file - ΔW live‖ / ‖ΔW live‖ of the worst module."""
OUTPUT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""By the dtype the loader computes in: largest difference of outputs / largest output."""
Forward = Callable[[nn.ModuleDict], Tensor]
"""Runs a small fixed batch; under autocast it must return the dtype it computed in (it sets the bound)."""


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

    def line(self, steps: str) -> str:
        """What "done" prints; `steps` as "5/5"."""
        note = f" ({self.notice})" if self.notice else ""
        return t(
            pt=f"pronto: {self.path}: {steps} passos, {self.num_modules} módulos, relido por {self.reader}: "
            f"saída difere {self.output_difference:.1e} da do treino e {self.effect:.1e} da base{note}",
            en=f"done: {self.path}: {steps} steps, {self.num_modules} modules, reloaded by {self.reader}: "
            f"output differs {self.output_difference:.1e} from the trainer's and {self.effect:.1e} from the base's{note}",
        )


@dataclass(frozen=True)
class Loaded:
    """`reader`: who put the file onto the model; `dtype`: of its adapter there; `drops_dora`: it left the magnitudes out."""

    reader: str
    dtype: torch.dtype = torch.float32
    drops_dora: bool = False


Load = Callable[[Any, nn.ModuleDict], Loaded]
"""Puts a file, given as its modules, onto the bare base, as the user's program does."""


def prove(model: nn.ModuleDict, adapter: Adapter, path: Path, load: Load, forward: Forward) -> Verification:
    """Model, adapter and random state come out as they went in, also after an error."""
    with host_memory():
        modules, changed = read_back(adapter, path)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _quiet_probe(model, adapter):
        with adapter.disabled():
            base = forward(model).float()
        with _lifted_out(model, adapter):
            loaded = load(modules, model)
            raw = forward(model)
        with _rounded(adapter, modules, loaded.dtype):
            reference = forward(model).float()
    difference, effect = relative(raw.float(), reference), relative(raw.float(), base)
    if not loaded.drops_dora:
        tolerance = max(OUTPUT_TOLERANCE[loaded.dtype], OUTPUT_TOLERANCE[raw.dtype])
        require(difference <= tolerance, path, f"output: {difference:.2e}")
        require(effect > 0 or torch.equal(reference, base), path, "no effect")
    notice = _dora_notice(difference) if loaded.drops_dora else ""
    return Verification(path, len(modules), changed, difference, effect, loaded.reader, notice if effect else _no_effect_notice())


def read_back(adapter: Adapter, path: Path) -> tuple[Modules, float]:
    """The file's modules, which are the adapter's; and by how much its dtype changed the effect of the worst."""
    dtype, live = _stored_dtype(path / WEIGHTS if path.is_dir() else path), adapter.modules()
    file = adapter.read(path)
    lines = differences(file, live)
    require(not lines, path, "; ".join(lines))
    changed = max(
        relative_norm(stored, own)
        for name in live
        for stored, own in zip(_effects(file.lora[name]), _effects(live[name]), strict=True)
    )
    require(changed <= FILE_TOLERANCE[dtype], path, f"delta W: {changed:.2e}")
    return file.lora, changed


def _effects(module: Any) -> list[Tensor]:
    magnitude = module.factors.get("magnitude")
    return [module.delta()] if magnitude is None else [module.delta(), magnitude]


def _stored_dtype(path: Path) -> torch.dtype:
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
def _lifted_out(model: nn.ModuleDict, adapter: Adapter) -> Iterator[None]:
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
def _rounded(adapter: Adapter, modules: Modules, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the live adapter holds the file's values in `dtype`; afterwards its own storages again."""
    tensors = adapter.named_tensors()
    state, own = adapter.state_of(modules), {key: tensor.data for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        tensor.data = state[key].to(tensor.device, dtype)
    try:
        yield
    finally:
        for key, tensor in tensors.items():
            tensor.data = own[key]


@contextmanager
def _quiet_probe(model: nn.ModuleDict, adapter: Adapter) -> Iterator[None]:
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


def relative_norm(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def require(condition: bool, path: Path, what: str) -> None:
    if not condition:
        raise MachineError.said(
            pt=f"o arquivo foi gravado, mas lido de volta não é o LoRA treinado ({what})",
            en=f"the file was written, but read back it is not the LoRA that was trained ({what})",
            hint_pt=f"não use este arquivo; relate o erro (diffusers {diffusers_library.__version__})",
            hint_en=f"do not use this file; report the error (diffusers {diffusers_library.__version__})",
            where=str(path),
        )


def _no_effect_notice() -> str:
    return t(pt="o LoRA não muda a saída do modelo", en="the LoRA does not change the model's output")


def _dora_notice(difference: float) -> str:
    return t(
        pt=f"atenção: o diffusers ignora o DoRA de arquivos kohya, e por isso nele a saída difere "
        f"{100 * difference:.1f} % da do treino; para o diffusers, acrescente diffusers a saida.formatos",
        en=f"attention: diffusers ignores DoRA in kohya files, so there the output differs "
        f"{100 * difference:.1f} % from the trainer's; for diffusers, add diffusers to output.formats",
    )
