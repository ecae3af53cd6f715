"""A GGUF file seen as a dictionary: metadata and the table of tensors are read at once, tensors when asked for.

The layout (ggml/docs/gguf.md): magic, version, counts; metadata as typed key-value pairs; for each tensor its name,
dimensions, kind and offset; then, aligned, the data. A vocabulary of 100 000 words and merges takes a tenth of a second
(the `gguf` package's reader, made of arrays, takes two seconds). Tensors are read, not mapped, for the reasons in
bases/weights.py. A model split over several files (name-00001-of-00003.gguf) is one GgufFile. Left out: version 1,
big-endian files.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import SourceError, t
from .headers import TensorInfo, _bytes, read_bytes

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
READ_AHEAD = 1 << 22
"""Bytes read at a time while the header lasts; most headers are one to eight MiB, for their vocabulary."""
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ITEMS = 1 << 28
"""More tensors, keys or array items than this, or a longer text, is a damaged file."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor(TensorInfo):
    """One tensor; `dtype` is ggml's name ("Q4_K", "F32"), `shape` in torch's order."""

    path: Path = Path()

    @property
    def row_bytes(self) -> int:
        """Blocks never cross rows, so a row is a whole number of bytes."""
        return self.nbytes // max(1, prod(self.shape[:-1]))


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of one model, however many files it lies in."""

    path: Path
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)

    def raw(self, name: str, rows: tuple[int, int] | None = None) -> "Tensor":
        """The tensor's bytes as stored, (rows, bytes of a row) uint8 on the CPU; rows as in its shape but the last.

        `rows` reads only some: first, number.
        """
        import torch

        info = self.tensors[name]
        first, number = rows or (0, prod(info.shape[:-1]))
        data = torch.empty(number * info.row_bytes, dtype=torch.uint8)
        read_bytes(info.path, info.offset + first * info.row_bytes, data.numpy().data)
        return data.view(number, info.row_bytes)

    @property
    def architecture(self) -> str:
        """ "llama", "qwen3", "flux", …; "" where the file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def data_bytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def open_gguf(path: Path, what: str = "modelo_base") -> GgufFile:
    """Read the header, and those of the other parts where the model is split. SourceError says what is wrong."""
    first = _read_header(path, what)
    count = int(first.metadata.get("split.count", 0) or 0)
    if count < 2:
        return first
    parts = [_read_header(part, what) for part in _parts(path, count, what)]
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        _damaged(path, what, f"{len(tensors)} ≠ {expected} {t(pt='tensores', en='tensors')}")
    return GgufFile(parts[0].path, parts[0].version, parts[0].metadata, tensors)


def _parts(path: Path, count: int, what: str) -> list[Path]:
    """All files of a split model, given any of them (llama.cpp's gguf-split names them so)."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[2]) != count:
        raise SourceError.said(
            pt=f"{path.name} é uma de {count} partes de um modelo, mas foi renomeado",
            en=f"{path.name} is one of {count} parts of a model, but was renamed",
            hint_pt=f"chame as partes de nome-00001-of-{count:05}.gguf, …",
            hint_en=f"name them x-00001-of-{count:05}.gguf, …",
            where=what,
        )
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[2]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise SourceError.said(
            pt=f"o modelo está dividido em {count} arquivos e faltam {len(missing)}: {', '.join(missing[:4])}",
            en=f"the model is split over {count} files and {len(missing)} are missing: {', '.join(missing[:4])}",
            hint_pt="baixe todas as partes na mesma pasta",
            hint_en="download all parts into the same folder",
            where=what,
        )
    return parts


class _Cursor:
    """Walks the header; bytes are read as they are needed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self.size = path.stat().st_size
        self._buffer = b""
        self.at = 0

    def __enter__(self) -> "_Cursor":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def _need(self, end: int) -> None:
        if end > self.size:
            raise EOFError
        while len(self._buffer) < end:
            self._buffer += self._file.read(max(READ_AHEAD, end - len(self._buffer)))

    def take(self, format: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + format)
        self._need(self.at + layout.size)
        values = layout.unpack_from(self._buffer, self.at)
        self.at += layout.size
        return values

    def count(self, format: str = "Q") -> int:
        """A number of things, refused where it cannot be true."""
        (number,) = self.take(format)
        if number > min(self.size, MAX_ITEMS):
            raise ValueError(t(pt=f"{number} itens anunciados", en=f"{number} items announced"))
        return int(number)

    def text(self) -> str:
        length = self.count()
        self._need(self.at + length)
        raw = self._buffer[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")  # some vocabularies hold pieces of characters

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            (item,) = self.take("I")
            length = self.count()
            if item in _SCALARS:
                return list(self.take(f"{length}{_SCALARS[item]}"))
            return [self.value(item) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"{t(pt='tipo', en='type')} {kind}")
        return self.take(_SCALARS[kind])[0]


def _read_header(path: Path, what: str) -> GgufFile:
    try:
        with _Cursor(path) as cursor:
            version = _version(cursor, path, what)
            num_tensors, num_keys = cursor.count(), cursor.count()
            metadata = {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(num_keys)}
            table = [_entry(cursor) for _ in range(num_tensors)]
            alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
            if alignment < 1 or alignment % 8:
                raise ValueError(f"general.alignment {alignment}")
            start = -(-cursor.at // alignment) * alignment
            size = cursor.size
    except OSError as error:
        raise SourceError(
            t(pt=f"não consegui ler {path}: {error.strerror}", en=f"cannot read {path}: {error.strerror}"),
            t(pt="verifique o caminho, as permissões e o disco", en="check path, permissions and disk"),
            what,
        ) from error
    except EOFError:
        _damaged(path, what, t(pt="acaba no meio do cabeçalho", en="it ends inside its header"))
    except (ValueError, struct.error, MemoryError, RecursionError) as error:
        _damaged(path, what, str(error))
    tensors = dict(_locate(table, start, path, what))
    needed = max((info.offset + info.nbytes for info in tensors.values()), default=0)
    if needed > size:
        have, wanted = _bytes(size), _bytes(needed)
        _damaged(
            path, what, t(pt=f"tem {have}, o cabeçalho pede {wanted}", en=f"it has {have}, its header asks for {wanted}")
        )
    return GgufFile(path, version, metadata, tensors)


def _version(cursor: _Cursor, path: Path, what: str) -> int:
    magic, number = cursor.take("4sI")
    if magic != MAGIC:
        raise SourceError(
            t(pt=f"{path.name} não é um arquivo GGUF", en=f"{path.name} is not a GGUF file"),
            t(pt="baixe o arquivo de novo, ou indique outro", en="download the file again, or give another"),
            what,
        )
    if number in VERSIONS:
        return int(number)
    if number >= 1 << 16:  # a small number whose bytes are the other way round
        problem = t(pt=f"{path.name} é um GGUF big-endian", en=f"{path.name} is a big-endian GGUF")
    else:
        problem = t(
            pt=f"{path.name} é GGUF versão {number}; leio as versões 2 e 3",
            en=f"{path.name} is GGUF version {number}; versions 2 and 3 are read",
        )
    hint = t(pt="use um GGUF atual do mesmo modelo", en="use a current GGUF of the same model")
    raise SourceError(problem, hint, what)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    num_dims = cursor.count("I")
    if num_dims > MAX_DIMS:
        raise ValueError(f"{name}: {num_dims} {t(pt='dimensões', en='dimensions')}")
    dims = cursor.take(f"{num_dims}Q")
    kind, offset = cursor.take("IQ")
    return name, tuple(reversed(dims)) or (1,), kind, offset


def _locate(
    table: list[tuple[str, tuple[int, ...], int, int]], start: int, path: Path, what: str
) -> Iterator[tuple[str, GgufTensor]]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    for name, shape, number, offset in table:
        kind, block, block_bytes = sizes.get(number, (f"#{number}", 1, 0))  # newer than the gguf package
        if shape[-1] % block:
            _damaged(path, what, f"{name} {list(shape)} {kind}")
        yield name, GgufTensor(kind, shape, prod(shape) // block * block_bytes, start + offset, path)


def _damaged(path: Path, what: str, detail: str) -> NoReturn:
    raise SourceError(
        t(pt=f"o GGUF {path.name} está danificado: {detail}", en=f"the GGUF {path.name} is damaged: {detail}"),
        t(pt="baixe o arquivo de novo", en="download the file again"),
        what,
    )
