"""Proof that a saved file works: re-read, and loaded by diffusers' own loader onto the very model that was trained.

The trainer's layers are lifted out, so that no second copy of the base is needed, and put back at the end with their
exact weights. Outputs are compared with the live adapter rounded as the file is; what the rounding itself cost is
measured apart, as the change of each module's delta W. One reading is known to differ: diffusers drops DoRA's
magnitudes from kohya files; then the difference is not refused but told. Left out: other programs (A1111, ComfyUI), which cannot be
called from here; the key lists in tests/golden stand for them.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers as diffusers_library
import torch
from torch import Tensor, nn

from ..engine.tracker import host_memory
from ..errors import t
from ..files.headers import read_header
from ..layouts import diffusers
from ..layouts.fused import slots_of
from ..layouts.read import LoraFile, differences, is_kohya, read_lora
from ..layouts.readers import reader_for
from .proof import (
    FILE_TOLERANCE,
    OUTPUT_TOLERANCE,
    Verification,
    check_consumer,
    delta_difference,
    lifted_out,
    no_effect_notice,
    quiet_probe,
    relative,
    require,
    rounded,
    stored_dtype,
)
from .verify_lycoris import verify_lycoris

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..seam.family import Family


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
        changed = max(delta_difference(file.lora[name], live[name]) for name in live)
    require(changed <= FILE_TOLERANCE[dtype], path, f"delta W: {changed:.2e}")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet_probe(model, adapter):
        with adapter.disabled():
            base = forward(model).float()
        with lifted_out(model, adapter):
            drops_dora = _load_as_consumer(model, family, path, file)
            compute_dtype = check_consumer(model, file.lora, path)
            raw = forward(model)
        with rounded(adapter, file.lora, compute_dtype):
            reference = forward(model).float()
    output_difference, effect = relative(raw.float(), reference), relative(raw.float(), base)
    notice = _dora_notice(output_difference) if drops_dora else ""
    if not drops_dora:
        tolerance = max(OUTPUT_TOLERANCE[compute_dtype], OUTPUT_TOLERANCE[raw.dtype])
        require(output_difference <= tolerance, path, f"output: {output_difference:.2e}")
        require(effect > 0 or torch.equal(reference, base), path, "no effect")
    if not effect:
        notice = no_effect_notice()
    reader = _our_reader() if _only_we_read(path, family) else f"diffusers {diffusers_library.__version__}"
    return Verification(path, len(live), changed, output_difference, effect, reader, notice)


def _only_we_read(path: Path, family: "Family") -> bool:
    """A kohya file of a model whose kohya files diffusers does not know."""
    return not getattr(family, "kohya_as_released", True) and is_kohya(read_header(path, path.name)[0])


def _our_reader() -> str:
    return t(
        pt="nosso leitor, pois o diffusers não lê este arquivo (para ele, acrescente diffusers a saida.formatos)",
        en="our own reader, since diffusers does not read this file (for it, add diffusers to output.formats)",
    )


def _read_checked(path: Path, adapter: "Adapter") -> tuple[LoraFile, torch.dtype]:
    """The file, found complete and finite, and the dtype of its matrices."""
    dtype = stored_dtype(path)
    prefixes, slots = adapter.family.export_prefixes(), slots_of(adapter.family)
    file = read_lora(path, list(adapter.layers), prefixes, adapter.layers_per_block, slots)
    lines = differences(file, adapter.export())
    require(not lines, path, "; ".join(lines))
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


