"""Which files hold the data, and their rows.

A file's content says what it is: JSON Lines called .json and the reverse are read as what they are. A folder is read
whole, in the order of its names; where it holds tables, its .txt and .md files are taken for read-mes. What cannot be
read is told at once, each fault with file and line. Not read: compressed files, spreadsheets.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..config.fields import printable
from ..config.names import shown
from ..data.json_rows import FileRows, Row, read_json
from ..data.notes import Notes, naming
from ..data.tables import read_csv, read_parquet
from ..data.text import decode
from ..data.walk import nfc, walk
from ..errors import DataError, t

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
DOCUMENTS = (".txt", ".md")
FIRST_PROBLEMS = 10
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_MAGIC = {
    b"\x1f\x8b": ("gzip", "gzip"),
    b"PK\x03\x04": ("zip ou planilha do Excel", "zip or Excel sheet"),
    b"BZh": ("bzip2", "bzip2"),
    b"\xfd7zXZ": ("xz", "xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd"),
}


@dataclass
class Rows:
    """The rows of all files, and the lines that are none: `bad` holds "file:line: what is wrong"."""

    rows: list[Row] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)


def read_rows(path: Path, *, recursive: bool = True, exclude: Iterable[Path] = ()) -> Rows:
    """All rows under `path`, a file or a folder. Raises DataError for files that cannot be read at all."""
    out = Rows()
    guessed: list[str] = []
    for file, name in _files(path, recursive, exclude, out.notes):
        try:
            found = _read(file, name, guessed)
        except DataError as error:
            out.notes.fail(f"{error.where}: {error.problem}", error.hint)
            continue
        out.files.append(name)
        out.rows += found.rows
        out.bad += found.problems
    out.notes.raise_errors()
    if guessed:
        out.notes.warn(
            pt="arquivos que não estão em UTF-8, lidos como Windows-1252; confira: " + "; ".join(guessed[:3]),
            en="files that are not UTF-8, read as Windows-1252; please check: " + "; ".join(guessed[:3]),
        )
    return out


def raise_bad(bad: list[str]) -> None:
    """All lines that are no rows in one error: the first ten, and how many more."""
    if not bad:
        return
    shown_lines = bad[:FIRST_PROBLEMS]
    if len(bad) > FIRST_PROBLEMS:
        rest = len(bad) - FIRST_PROBLEMS
        shown_lines.append(t(pt=f"… e mais {rest}", en=f"… and {rest} more"))
    raise DataError(
        "\n".join(shown_lines),
        hint=t(
            pt="corrija as linhas, ou use dados.linhas_ruins: pular",
            en="mend the lines, or use data.bad_rows: skip",
        ),
    )


def _files(path: Path, recursive: bool, exclude: Iterable[Path], notes: Notes) -> list[tuple[Path, str]]:
    """(file, its name in messages)."""
    if not path.exists():
        raise DataError.said(pt=f"não existe: {path}", en=f"does not exist: {path}", where=shown("data", "data_dir"))
    if path.is_file():
        return [(path, printable(nfc(path.name)))]
    found = walk(path, recursive=recursive, exclude=exclude, suffixes=frozenset((*TABLES, *DOCUMENTS)))
    named = [(file, found.name(file)) for folder in found.folders for file in folder.images]
    named = [(file, name) for file, name in named if file.name.lower() not in _DESCRIPTIONS]
    tables = [(file, name) for file, name in named if file.suffix.lower() in TABLES]
    for name, reason in found.unreadable:
        notes.fail(f"{name}: {reason}")
    compressed = [found.name(f) for d in found.folders for n, f in d.others.items() if n.endswith((".gz", ".zip"))]
    if compressed:
        told = naming(compressed)
        notes.warn(pt=f"comprimidos, não lidos: {told}", en=f"compressed, not read: {told}")
    if tables and len(tables) < len(named):
        told = naming([name for file, name in named if file.suffix.lower() in DOCUMENTS])
        notes.note(pt=f"há tabelas na pasta; não lidos: {told}", en=f"the folder holds tables; not read: {told}")
    if not named and not notes.errors:
        kinds = ", ".join((*TABLES, *DOCUMENTS))
        raise DataError(
            t(pt=f"nenhum texto em {path}; extensões lidas: {kinds}", en=f"no text in {path}; read are: {kinds}"),
            where=shown("data", "data_dir"),
        )
    return tables or named


def _read(path: Path, name: str, guessed: list[str]) -> FileRows:
    try:
        with path.open("rb") as file:
            start = file.read(8)
        if start.startswith(b"PAR1"):
            return read_parquet(path, name)
        data = path.read_bytes()
    except OSError as error:
        raise DataError.said(pt=f"não consigo ler: {error.strerror}", en=f"unreadable: {error.strerror}", where=name) from error
    if problem := _not_text(data, path):
        raise DataError(problem, "", name)
    decoded = decode(data)
    if decoded.encoding == "cp1252":
        guessed.append(f"{name}: {next(line for line in decoded.text.split(chr(10)) if not line.isascii())[:60]!r}")
    suffix = path.suffix.lower()
    if suffix in DOCUMENTS:
        return FileRows(name, [Row(f"{name}:1", {"text": decoded.text})])
    return read_csv(decoded.text, name) if suffix in (".csv", ".tsv") else read_json(decoded.text, name)


def _not_text(data: bytes, path: Path) -> str:
    """Why these bytes hold no rows, or ""."""
    for magic, (pt, en) in _MAGIC.items():
        if data.startswith(magic):
            return t(
                pt=f"é um arquivo comprimido ({pt}); extraia-o antes, ou salve a planilha como CSV",
                en=f"is a compressed file ({en}); unpack it first, or save the sheet as CSV",
            )
    text = data.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text and path.suffix.lower() not in DOCUMENTS:
        return t(pt="está vazio", en="is empty")
    if text.startswith(b"version https://git-lfs"):
        return t(
            pt="é um ponteiro git-lfs, não os dados; baixe o arquivo de verdade",
            en="is a git-lfs pointer, not the data; download the file itself",
        )
    if path.suffix.lower() not in DOCUMENTS and text.startswith(b"<"):
        return t(
            pt="parece uma página web, não dados; baixe o arquivo de novo",
            en="looks like a web page, not data; download the file again",
        )
    if path.suffix.lower() == ".parquet":
        return t(pt="não é um arquivo Parquet", en="is no Parquet file")
    return ""
