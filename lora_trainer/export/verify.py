"""Proof that a saved file works: re-read, and loaded by diffusers' own loader onto the very model that was trained.

The trainer's layers are lifted out, so that no second copy of the base is needed, and put back at the end with their
exact weights. Outputs are compared with the live adapter rounded as the file is; what the rounding itself cost is
measured apart, as the change of each module's delta W. One reading is known to differ: diffusers drops DoRA's
magnitudes from kohya files; then the difference is not refused but told. Left out: other programs (A1111, ComfyUI), which cannot be
called from here; the key lists in tests/golden stand for them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers as diffusers_library
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..errors import DivergedError, MachineError, t
from ..headers import read_header
from ..tracker import host_memory
from . import diffusers
from ._lora import Lora, LoraModule
from .fused import slots_of
from .lycoris import Lycoris
from .read import LoraFile, differences, is_kohya, read_lora, read_tensors
from .readers import reader_for
from .verify_lycoris import verify_lycoris

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..families._base import Family

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


def verify(
    model: nn.ModuleDict, adapter: "Adapter", family: "Family", path: Path, forward: Callable[[nn.ModuleDict], Tensor]
) -> Verification:
    """Model, adapter and random state come out as they went in, also after an error.

    `forward` runs a small fixed batch; under autocast it must return the dtype it computed in (it sets the bound).
    """
    if adapter.kind != "lora":
        return verify_lycoris(model, adapter, family, path, forward)
    with host_memory():
        live = adapter.export()
        file, dtype = _read_checked(path, adapter)
        delta_difference = max(_delta_difference(file.lora[name], live[name]) for name in live)
    _require(delta_difference <= FILE_TOLERANCE[dtype], path, f"delta W: {delta_difference:.2e}")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _quiet_probe(model, adapter):
        with adapter.disabled():
            base = forward(model).float()
        with _lifted_out(model, adapter):
            drops_dora = _load_as_consumer(model, family, path, file)
            compute_dtype = _check_consumer(model, file.lora, path)
            raw = forward(model)
        with _rounded(adapter, file.lora, compute_dtype):
            reference = forward(model).float()
    output_difference, effect = _relative(raw.float(), reference), _relative(raw.float(), base)
    notice = _dora_notice(output_difference) if drops_dora else ""
    if not drops_dora:
        tolerance = max(OUTPUT_TOLERANCE[compute_dtype], OUTPUT_TOLERANCE[raw.dtype])
        _require(output_difference <= tolerance, path, f"output: {output_difference:.2e}")
        _require(effect > 0 or torch.equal(reference, base), path, "no effect")
    if not effect:
        notice = no_effect_notice()
    reader = _our_reader() if _only_we_read(path, family) else f"diffusers {diffusers_library.__version__}"
    return Verification(path, len(live), delta_difference, output_difference, effect, reader, notice)


def _only_we_read(path: Path, family: "Family") -> bool:
    """A kohya file of a model whose kohya files diffusers does not know."""
    return not getattr(family, "kohya_as_released", True) and is_kohya(read_header(path, path.name)[0])


def _our_reader() -> str:
    return t(
        pt="nosso leitor, pois o diffusers não lê este arquivo (para ele, acrescente diffusers a saida.formatos)",
        en="our own reader, since diffusers does not read this file (for it, add diffusers to output.formats)",
    )


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


def _read_checked(path: Path, adapter: "Adapter") -> tuple[LoraFile, torch.dtype]:
    """The file, found complete and finite, and the dtype of its matrices."""
    dtype = stored_dtype(path)
    prefixes, slots = adapter.family.export_prefixes(), slots_of(adapter.family)
    file = read_lora(path, list(adapter.layers), prefixes, adapter.layers_per_block, slots)
    lines = differences(file, adapter.export())
    _require(not lines, path, "; ".join(lines))
    return file, dtype


def _load_as_consumer(model: nn.ModuleDict, family: "Family", path: Path, file: LoraFile) -> bool:
    """Load the file with diffusers' pipeline loader; returns whether that left out DoRA's magnitudes."""
    reader = reader_for(family)
    if "transformer" in model:
        _load_into_transformer(reader, model, family, path, file)
        return False
    state, alphas, metadata = reader.lora_state_dict(
        str(path), unet_config=getattr(model["unet"], "config", None), local_files_only=True, return_lora_metadata=True
    )
    parts = sorted({name.partition(".")[0] for name in file.lora})
    for part in parts:
        if part.startswith("text_encoder"):
            reader.load_lora_into_text_encoder(state, alphas, model[part], prefix=part, metadata=metadata)
        else:
            reader.load_lora_into_unet(state, alphas, model[part], metadata=metadata)
    has_dora = any(module.magnitude is not None for module in file.lora.values())
    return has_dora and not any("magnitude" in key for key in state)


def _load_into_transformer(reader: Any, model: nn.ModuleDict, family: "Family", path: Path, file: LoraFile) -> None:
    """A kohya file comes with parts that are all zero; and diffusers takes it apart for the released sizes only: for others
    our own reading of it goes through the loader. Some loaders keep alphas apart (FLUX's); others fold them in."""
    apart = "network_alphas" in inspect.signature(reader.load_lora_into_transformer).parameters
    alphas = None
    if _only_we_read(path, family):
        state, metadata = diffusers.pack(diffusers.folded(file.lora), {}), None
    else:
        wanted = {"return_lora_metadata": True, **({"return_alphas": True} if apart else {})}
        state, *between, metadata = reader.lora_state_dict(str(path), local_files_only=True, **wanted)
        alphas = between[0] if apart else None
    empty = {key.partition(".lora_B")[0] for key, value in state.items() if ".lora_B" in key and not bool(value.any())}
    gone = empty - file.lora.keys()
    state = {key: value for key, value in state.items() if key.partition(".lora_")[0] not in gone}
    options = {"network_alphas": alphas} if apart else {}
    reader.load_lora_into_transformer(state, transformer=model["transformer"], metadata=metadata, **options)


def _dora_notice(difference: float) -> str:
    return t(
        pt=f"atenção: o diffusers ignora o DoRA de arquivos kohya, e por isso nele a saída difere "
        f"{100 * difference:.1f} % da do treino; para o diffusers, acrescente diffusers a saida.formatos",
        en=f"attention: diffusers ignores DoRA in kohya files, so there the output differs "
        f"{100 * difference:.1f} % from the trainer's; for diffusers, add diffusers to output.formats",
    )


@torch.no_grad()
def _check_consumer(model: nn.ModuleDict, lora: Lora, path: Path) -> torch.dtype:
    """Every module was loaded with the file's effect; returns the dtype its weights were loaded in."""
    loaded = _layers(model)
    _require(loaded.keys() == lora.keys(), path, f"diffusers: {len(loaded)} / {len(lora)}")
    dtype = torch.float32
    for name, layer in loaded.items():
        (key,) = layer.lora_A.keys()
        dtype = layer.lora_A[key].weight.dtype
        with host_memory():
            down, up = (matrix[key].weight.to("cpu", torch.float32) for matrix in (layer.lora_A, layer.lora_B))
            got = float(layer.scaling[key]) * (up.flatten(1) @ down.flatten(1))
            difference = _relative(got, lora[name].delta())
        _require(difference <= FILE_TOLERANCE[dtype], path, f"diffusers, {name}: {difference:.2e}")
    return dtype


@contextmanager
def _lifted_out(model: nn.ModuleDict, adapter: "Adapter") -> Iterator[None]:
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
def _rounded(adapter: "Adapter", lora: Lora | Lycoris, dtype: torch.dtype) -> Iterator[None]:
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
def _quiet_probe(model: nn.ModuleDict, adapter: "Adapter") -> Iterator[None]:
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


def _delta_difference(stored: LoraModule, live: LoraModule) -> float:
    pairs = [(stored.delta(), live.delta())]
    if stored.magnitude is not None and live.magnitude is not None:
        pairs.append((stored.magnitude, live.magnitude))
    return max(_relative_norm(a, b) for a, b in pairs)


def _relative_norm(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def _require(condition: bool, path: Path, what: str) -> None:
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
