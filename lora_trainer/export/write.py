"""An adapter file: tensors in the asked precision, checked, hashed, written in one atomic step.

The file's bytes depend on the adapter and the metadata alone, so that an interrupted and resumed run ends in an equal
file; the header is written here because safetensors orders its metadata at random. fp16 holds numbers from 6e-8 to
65504: where a module's values would fall below, a power of two moves between its two matrices, which leaves their
product as it was. What overflows even so belongs to a training that diverged, and is refused. There is no fp8: too
coarse for a product.
"""

import errno
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor

from ..atomic import replacing
from ..errors import DivergedError, MachineError, t
from ..layouts import diffusers, fused, kohya, lycoris
from ..layouts.lora import Lora
from .metadata import as_text, capped, hashes, network_facts

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..seam.family import Family

Format = Literal["kohya", "diffusers"]
Precision = Literal["fp16", "bf16", "fp32"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MAX_FLUSHED = 0.001
"""Share of non-zero values that may become zero in the file before it is reported."""

log = logging.getLogger(__name__)


def save_adapter(
    adapter: "Adapter", family: "Family", path: Path, format: Format, precision: Precision, metadata: Mapping[str, Any]
) -> Path:
    """Write `path`; DivergedError, and nothing written, if a value is not finite. Notices go to the log."""
    tensors, facts = (_lora if adapter.kind == "lora" else _lycoris)(adapter, family, path, format, precision)
    stored = cast(tensors, DTYPES[precision], path)
    text, notices = capped({**metadata, **facts})
    for notice in notices:
        log.warning(notice)
    write_atomically(path, serialise(stored, text))
    return path


def _lora(
    adapter: "Adapter", family: "Family", path: Path, format: Format, precision: Precision
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the file holds, and what only it can tell."""
    lora = adapter.export()
    _refuse_non_finite({name: module.tensors for name, module in lora.items()}, path)
    if format == "diffusers":
        lora = diffusers.folded(lora)
    if precision == "fp16":
        lora = {name: m.balanced() if any(map(_needs_balance, m.tensors[:2])) else m for name, m in lora.items()}
    facts = network_facts(lora)
    if format == "diffusers":
        facts |= diffusers.adapter_metadata(lora)
    return _pack(lora, family, format), facts


def _lycoris(
    adapter: "Adapter", family: "Family", path: Path, format: Format, precision: Precision
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The same of a LoHa or LoKr."""
    modules = adapter.export_lycoris()
    _refuse_non_finite({name: list(module.factors.values()) for name, module in modules.items()}, path)
    if format == "diffusers":
        modules = {name: module.with_scale(1.0) for name, module in modules.items()}
    if precision == "fp16":
        modules = {
            name: m.balanced() if any(map(_needs_balance, m.factors.values())) else m for name, m in modules.items()
        }
    shapes = {name: tuple(layer.weight.shape) for name, layer in adapter.layers.items()}
    facts = as_text(lycoris.network_facts(modules, shapes))
    return lycoris.pack(modules, family.export_prefixes(), format), facts


def _pack(lora: Lora, family: "Family", format: Format) -> dict[str, Tensor]:
    if format == "diffusers":
        return diffusers.pack(lora, family.export_prefixes())
    slots = fused.slots_of(family)
    return kohya.pack(lora, family.export_prefixes()) if slots is None else fused.pack(lora, slots)


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
            raise DivergedError(
                t(
                    pt=f"o tensor `{key}` passa do máximo de {dtype}: o treino divergiu",
                    en=f"tensor `{key}` exceeds the largest {dtype}: the training diverged",
                ),
                t(
                    pt="diminua taxa_aprendizado; para guardar assim mesmo, use precisao: fp32",
                    en="lower learning_rate; to keep it all the same, use precision: fp32",
                ),
                str(path),
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
    entries = {"__metadata__": {"format": "pt", **dict(sorted(metadata.items()))}, **header}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def write_atomically(path: Path, data: bytes) -> None:
    """All of `data` or, after any failure, what was there before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = t(pt="o disco está cheio", en="the disk is full") if full else str(error)
        raise MachineError(
            t(pt=f"não foi possível gravar o arquivo ({reason})", en=f"the file could not be written ({reason})"),
            t(
                pt=f"libere {len(data) / 2**20:.0f} MiB ou mude saida.diretorio",
                en=f"free {len(data) / 2**20:.0f} MiB or change output.dir",
            ),
            str(path),
        ) from error


def _needs_balance(matrix: Tensor) -> bool:
    """Whether fp16 would round the matrix by over 2**-12 of its size, lose over 0.1 % of its values, or overflow."""
    limits = torch.finfo(torch.float16)
    size = matrix.abs()
    if not float(size.max()):
        return False
    lost = int(((size > 0) & (size < limits.smallest_normal * 2.0**-11)).sum()) > MAX_FLUSHED * int((size > 0).sum())
    return lost or float(size.max()) > limits.max or float(size.square().mean().sqrt()) < 2.0**-12


def _refuse_non_finite(modules: Mapping[str, list[Tensor]], path: Path) -> None:
    wrong = [name for name, tensors in modules.items() if not all(bool(x.isfinite().all()) for x in tensors)]
    if wrong:
        raise DivergedError(
            t(
                pt=f"{len(wrong)} de {len(modules)} módulos do LoRA têm NaN ou infinito ({wrong[0]}, …); nada foi gravado",
                en=f"{len(wrong)} of {len(modules)} LoRA modules hold NaN or infinity ({wrong[0]}, …); nothing written",
            ),
            t(
                pt="diminua taxa_aprendizado e retome do último arquivo bom",
                en="lower learning_rate and resume from the last good file",
            ),
            str(path),
        )
