"""What a weights file says about itself, read from its first kilobytes: no torch, no weights, nothing executed.

A .safetensors file is 8 bytes of little-endian length, that many bytes of JSON, then the tensors. The JSON is parsed
here by hand, so that each way in which a download can be broken gets a message of its own, in milliseconds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from ..errors import SourceError, t

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
PICKLE_SUFFIXES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `offset` is the place of its first byte, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0


Header = Mapping[str, TensorInfo]


def read_header(path: Path, what: str) -> tuple[Header, dict[str, str]]:
    """Tensors and metadata of a .safetensors file; SourceError with the cause when it is not a whole one."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        refuse_pickle(path, what)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(512)
            length = int.from_bytes(start[:8], "little")
            plausible = 2 <= length <= min(MAX_HEADER_BYTES, size - 8) and start[8:9] == b"{"
            raw = start[8:] + file.read(max(0, length + 8 - len(start))) if plausible else b""
    except OSError as error:
        raise SourceError(
            t(pt=f"não consegui ler {path}: {error.strerror}", en=f"cannot read {path}: {error.strerror}"),
            t(pt="verifique as permissões e o disco", en="check permissions and disk"),
            what,
        ) from error
    if not plausible:
        _explain(path, what, start, length, size)
    return _parse(path, what, raw[:length], size, 8 + length)


def read_bytes(path: Path, offset: int, into: memoryview) -> None:
    """Fill `into` from a place in the file; SourceError where the file has become shorter."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(into) != into.nbytes:
            raise SourceError(
                t(pt=f"{path} mudou enquanto era lido", en=f"{path} changed while it was being read"),
                t(pt="comece de novo", en="start again"),
            )


def _parse(path: Path, what: str, raw: bytes, size: int, start: int) -> tuple[Header, dict[str, str]]:
    try:
        table: dict[str, Any] = json.loads(raw)
        metadata = {str(k): str(v) for k, v in (table.pop("__metadata__", None) or {}).items()}
        header = {name: _tensor_info(entry, start) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(
            t(
                pt=f"{path.name}: o cabeçalho do arquivo está estragado ({error})",
                en=f"{path.name}: the file's header is damaged ({error})",
            ),
            _download_again(),
            what,
        ) from error
    needed = max((info.offset + info.nbytes for info in header.values()), default=start)
    if needed > size:
        raise SourceError(
            t(
                pt=f"{path.name} está incompleto: tem {_bytes(size)}, o cabeçalho pede {_bytes(needed)}",
                en=f"{path.name} is incomplete: it has {_bytes(size)}, its header asks for {_bytes(needed)}",
            ),
            _download_again(),
            what,
        )
    return header, metadata


def _tensor_info(entry: dict[str, Any], start: int) -> TensorInfo:
    first, last = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    bits = BITS.get(entry["dtype"])
    if bits is None:
        raise ValueError(f"dtype {entry['dtype']}")
    if first < 0 or any(n < 0 for n in shape) or (prod(shape) * bits + 7) // 8 != last - first:
        raise ValueError("data_offsets")
    return TensorInfo(entry["dtype"], shape, last - first, start + first)


def _bytes(count: int) -> str:
    """Exact, and readable where that helps."""
    exact = f"{count:,}".replace(",", t(pt=".", en=",")) + " bytes"
    unit, name = next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u), (1, ""))
    return f"{count / unit:.2f} {name} ({exact})" if name else exact


def _download_again() -> str:
    return t(
        pt="o download foi interrompido ou alterado: baixe o arquivo de novo",
        en="the download was cut short or altered: download the file again",
    )


def _all_zero(path: Path) -> bool:
    with path.open("rb") as file:
        return (
            not any(any(block) for block in iter(lambda: file.read(1 << 16), b""))
            if path.stat().st_size < 2**26
            else not any(file.read(1 << 20))
        )


def _explain(path: Path, what: str, start: bytes, length: int, size: int) -> NoReturn:
    """Say which kind of wrong file this is, from its first bytes."""
    name, text = path.name, start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    again = _download_again()
    if size == 0:
        problem = t(pt=f"{name} está vazio (0 bytes)", en=f"{name} is empty (0 bytes)")
    elif text.startswith(b"version https://git-lfs"):
        problem = t(
            pt=f"{name} é um ponteiro git-lfs: o texto que fica no lugar do arquivo, não os pesos",
            en=f"{name} is a git-lfs pointer: the text that stands for the file, not the weights",
        )
        again = t(
            pt="rode `git lfs pull` na pasta do repositório, ou baixe o arquivo pelo site",
            en="run `git lfs pull` in the repository's folder, or download the file from its page",
        )
    elif text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        problem = t(pt=f"{name} é uma página web, não um modelo", en=f"{name} is a web page, not a model")
        again = t(
            pt="o site pediu login ou confirmação: abra o link no navegador e baixe o arquivo em si",
            en="the site wanted a login or a click: open the link in a browser and download the file itself",
        )
    elif not any(start) and _all_zero(path):
        problem = t(
            pt=f"{name} só tem zeros: o espaço foi reservado, mas os dados não chegaram",
            en=f"{name} holds nothing but zeros: space was reserved, the data never came",
        )
    elif start[:4] == b"GGUF":
        problem = t(
            pt=f"{name} está em GGUF, um formato de inferência: não serve de modelo base aqui",
            en=f"{name} is GGUF, a format for inference: it cannot be a base here",
        )
        again = t(
            pt="use o .safetensors do mesmo modelo (fp16, bf16 ou fp8)",
            en="use the .safetensors of the same model (fp16, bf16 or fp8)",
        )
    elif _is_pickle(start):
        refuse_pickle(path, what, renamed=True)
    elif start[8:9] == b"{" and length <= MAX_HEADER_BYTES:
        problem = t(
            pt=f"{name} está incompleto: tem {_bytes(size)}, o cabeçalho pede mais de {_bytes(8 + length)}",
            en=f"{name} is incomplete: it has {_bytes(size)}, its header asks for over {_bytes(8 + length)}",
        )
    else:
        problem = t(pt=f"{name} não é um arquivo .safetensors", en=f"{name} is not a .safetensors file")
    raise SourceError(problem, again, what)


def _is_pickle(start: bytes) -> bool:
    """A zip archive (torch.save since 1.6) or a pickle stream of protocol 2 to 5."""
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))


def refuse_pickle(path: Path, what: str, renamed: bool = False) -> NoReturn:
    """Pickles can run any code when they are opened, so they never are."""
    problem = (
        t(
            pt=f"{path.name} é um pickle com nome errado: o conteúdo é de um .ckpt/.pt/.bin",
            en=f"{path.name} is a pickle under a wrong name: its content is that of a .ckpt/.pt/.bin",
        )
        if renamed
        else t(
            pt=f"{path.name} é um pickle ({path.suffix}), formato que pode executar código ao ser aberto: não é lido",
            en=f"{path.name} is a pickle ({path.suffix}), a format that can run code when opened: it is not read",
        )
    )
    hint = t(
        pt="baixe a versão .safetensors do mesmo modelo; se só há esta e você confia na origem, converta-a "
        "(no A1111: aba Checkpoint Merger, um só modelo, formato safetensors)",
        en="download the .safetensors version of the same model; if there is only this one and you trust its source, "
        "convert it (in A1111: Checkpoint Merger tab, a single model, format safetensors)",
    )
    raise SourceError(problem, hint, what)
