"""An adapter file: tensors in the asked precision, checked, hashed, written in one atomic step.

The file's bytes depend on the adapter and the metadata alone, so that an interrupted and resumed run ends in an equal
file; the header is written here because safetensors orders its metadata at random. fp16 holds numbers from 6e-8 to
65504: where a module's values would fall below, a power of two moves between its two matrices, which leaves their
product as it was. What overflows even so belongs to a training that diverged, and is refused. There is no fp8: too
coarse for a product.
"""

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from ..adapters import Adapter
from ..adapters.targets import is_wide_conv
from ..errors import DivergedError, t
from ..layouts import diffusers, fused, kohya, lycoris_files
from ..seam.family import Family
from ._folders import header_bytes, new_file
from .metadata import capped, hashes, network_facts

Format = Literal["kohya", "diffusers"]
Precision = Literal["fp16", "bf16", "fp32"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_FLUSHED = 0.001
"""Share of non-zero values that may become zero in the file before it is reported."""

log = logging.getLogger(__name__)


def save_adapter(
    adapter: Adapter, family: Family, path: Path, format: Format, precision: Precision, metadata: Mapping[str, Any]
) -> Path:
    """Write `path`; DivergedError, and nothing written, if a value is not finite. Notices go to the log."""
    modules = prepared(adapter.modules(), precision, path, folded=format == "diffusers")
    wide = [name for name, layer in adapter.layers.items() if is_wide_conv(layer.base_layer)]
    facts = network_facts(modules, adapter.kind, wide)
    if format == "diffusers" and adapter.kind == "lora":
        facts |= diffusers.adapter_metadata(modules)
    stored = cast(_pack(modules, adapter.kind, family, format), DTYPES[precision], path)
    text, notices = capped({**metadata, **facts})
    for notice in notices:
        log.warning(notice)
    write_atomically(path, serialise(stored, text))
    return path


def prepared(modules: Any, precision: Precision, path: Path, *, folded: bool = False) -> Any:
    """Found finite; `folded`: of scale 1; and so balanced that fp16 holds them."""
    _refuse_non_finite(modules, path)
    if folded:
        modules = {name: module.with_scale(1.0) for name, module in modules.items()}
    if precision != "fp16":
        return modules
    return {name: m.balanced() if any(map(_needs_balance, m.matrices)) else m for name, m in modules.items()}


def _pack(modules: Any, kind: str, family: Family, format: Format) -> dict[str, Tensor]:
    prefixes = family.export_prefixes()
    if kind != "lora":
        return lycoris_files.pack(modules, prefixes, format)
    if format == "diffusers":
        return diffusers.pack(modules)
    return kohya.pack(modules, prefixes) if family.kohya_slots is None else fused.pack(modules, family.kohya_slots)


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype, path: Path) -> dict[str, Tensor]:
    """Contiguous copies in `dtype`. An alpha that it cannot hold exactly stays float32."""
    stored: dict[str, Tensor] = {}
    nonzero = flushed = 0
    for key, tensor in tensors.items():
        value = tensor.to(dtype).contiguous()
        if key.endswith(".alpha"):
            stored[key] = value if bool(value.float() == tensor) else tensor
            continue
        if not bool(value.isfinite().all()):
            raise DivergedError.said(
                pt=f"o tensor `{key}` passa do máximo de {dtype}: o treino divergiu",
                en=f"tensor `{key}` exceeds the largest {dtype}: the training diverged",
                hint_pt="diminua taxa_aprendizado; para guardar assim mesmo, use precisao: fp32",
                hint_en="lower learning_rate; to keep it all the same, use precision: fp32",
                where=str(path),
            )
        nonzero += int(tensor.count_nonzero())
        flushed += int((tensor != 0).logical_and(value == 0).sum())
        stored[key] = value
    if flushed > MAX_FLUSHED * nonzero:
        share = 100 * flushed / nonzero
        log.warning(
            t(
                pt=f"{path.name}: {share:.1f} % dos valores viraram zero em {dtype}; use precisao: fp32",
                en=f"{path.name}: {share:.1f} % of the values became zero in {dtype}; use precision: fp32",
            )
        )
    return stored


def serialise(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file, hashes included. Metadata does not touch the body, so its hash is taken once, before."""
    raw = save(tensors)
    size = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    training_only = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    complete = {**metadata, **hashes(body, _with_header(header, training_only, body))}
    return _with_header(header, complete, body)


def _with_header(header: Mapping[str, Any], metadata: Mapping[str, str], body: bytes) -> bytes:
    return header_bytes({"__metadata__": {"format": "pt", **dict(sorted(metadata.items()))}, **header}) + body


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` or, after any failure, what was there before."""
    with new_file(path, len(data)) as temporary:
        temporary.write_bytes(data)


def _needs_balance(matrix: Tensor) -> bool:
    """Whether fp16 would round the matrix by over 2**-12 of its size, lose over 0.1 % of its values, or overflow."""
    limits = torch.finfo(torch.float16)
    size = matrix.abs()
    if not float(size.max()):
        return False
    lost = int(((size > 0) & (size < limits.smallest_normal * 2.0**-11)).sum()) > MAX_FLUSHED * int((size > 0).sum())
    return lost or float(size.max()) > limits.max or float(size.square().mean().sqrt()) < 2.0**-12


def _refuse_non_finite(modules: Any, path: Path) -> None:
    wrong = [name for name, m in modules.items() if not all(bool(x.isfinite().all()) for x in m.factors.values())]
    if wrong:
        raise DivergedError.said(
            pt=f"{len(wrong)} de {len(modules)} módulos do LoRA têm NaN ou infinito ({wrong[0]}, …); nada foi gravado",
            en=f"{len(wrong)} of {len(modules)} LoRA modules hold NaN or infinity ({wrong[0]}, …); nothing written",
            hint_pt="diminua taxa_aprendizado e retome do último arquivo bom",
            hint_en="lower learning_rate and resume from the last good file",
            where=str(path),
        )
