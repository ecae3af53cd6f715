"""Captions in one table: `metadata.jsonl` or `metadata.csv` in the manner of Hugging Face's imagefolder.

A row names a file (relative to the table's folder, or by its bare name where that is unique) and holds a caption, or a
list of captions. Whatever is wrong with a table is gathered with its line number and told at once. Not read: parquet.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..config.fields import printable
from ..errors import t
from .json_rows import Row, read_json, whole
from .tables import read_csv
from .text import decode
from .walk import nfc

NAMES = ("metadata.jsonl", "metadata.csv")
_LOOKALIKES = ("metadata.json", "captions.csv", "captions.jsonl", "caption.csv", "legendas.csv", "metadata.parquet")
_FILE_COLUMNS = ("file_name", "filename", "file", "image", "image_path", "path", "arquivo", "imagem")


@dataclass
class Table:
    path: Path
    captions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """File as the row names it (NFC, `/`) -> its captions."""
    problems: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    """Files that several rows name, with the lines; the last row counts."""
    guessed: str = ""
    """A sample of its text, if it was not UTF-8."""


def lookalikes(names: Iterable[str]) -> list[str]:
    """Files that were probably meant to be a table."""
    close = [name for name in names if name not in NAMES and Path(name).suffix not in (".txt", ".caption")]
    return [n for n in close if n in _LOOKALIKES or difflib.get_close_matches(n, NAMES, n=1, cutoff=0.85)]


def read_table(path: Path, name: str, column: str | None) -> Table:
    """`name` is what messages call the file; `column` the caption column, if the user chose one."""
    table = Table(path)
    decoded = decode(path.read_bytes())
    text = decoded.text
    if decoded.encoding == "cp1252":
        table.guessed = next((line for line in text.split("\n") if not line.isascii()), "")
    found = read_csv(text, name, strict=False) if path.suffix.lower() == ".csv" else read_json(text, name, plain=True)
    rows, table.problems = found.rows, found.problems
    if table.problems or not rows:
        return table
    columns = list(dict.fromkeys(key for row in rows for key in row.fields))
    file_column = next((c for known in _FILE_COLUMNS for c in columns if c.lower() == known), None)
    if file_column is None:
        table.problems.append(_no_file_column(name, columns))
        return table
    caption_column = _caption_column(rows, columns, file_column, column)
    if caption_column is None:
        table.problems.append(_no_caption_column(name, columns, column or "text"))
        return table
    places: dict[str, str] = {}
    for row in rows:
        file = row.fields.get(file_column)
        if not isinstance(file, str) or not file.strip() or not whole(file):
            table.problems.append(t(pt=f"{row.where}: linha sem {file_column}", en=f"{row.where}: no {file_column}"))
            continue
        key = nfc(str(PurePosixPath(file.strip().replace("\\", "/"))))
        value = row.fields.get(caption_column)
        if problem := _caption_problem(value):
            table.problems.append(f"{row.where}: {caption_column}: {problem}")
            continue
        if key in places:
            table.repeated.append(f"{printable(key)} ({places[key]}, {row.where})")
        places[key] = row.where
        table.captions[key] = _texts(value)
    return table


def _caption_column(rows: list[Row], columns: list[str], file: str, chosen: str | None) -> str | None:
    if chosen is not None:
        return chosen if chosen in columns else None
    if "text" in columns:
        return "text"
    textual = [c for c in columns if c != file and any(isinstance(row.fields.get(c), (str, list)) for row in rows)]
    return textual[0] if len(textual) == 1 else None


def _no_file_column(name: str, columns: list[str]) -> str:
    return t(
        pt=f"{name}: não achei a coluna com o nome do arquivo (`file_name`); colunas: {', '.join(columns)}",
        en=f"{name}: no column with the file's name (`file_name`); columns: {', '.join(columns)}",
    )


def _no_caption_column(name: str, columns: list[str], wanted: str) -> str:
    return t(
        pt=f"{name}: não achei a coluna `{wanted}`; colunas: {', '.join(columns)}. Indique-a em dados.coluna_legenda",
        en=f"{name}: no column `{wanted}`; columns: {', '.join(columns)}. Name it in data.caption_column",
    )


def _caption_problem(value: Any) -> str:
    """Why a value cannot be a caption, or ""."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, (dict, list, bool)):
            shown = json.dumps(item, ensure_ascii=True)
            shown = shown if len(shown) <= 60 else shown[:57] + "…"
            return t(
                pt=f"a legenda precisa ser um texto ou uma lista de textos, veio {shown}",
                en=f"a caption must be a text or a list of texts, got {shown}",
            )
        if isinstance(item, str) and not whole(item):
            return t(pt="a legenda tem metade de um caractere Unicode", en="the caption holds half a Unicode character")
    return ""


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    texts = (nfc(" ".join(str(v).split())) for v in values if v is not None)
    return tuple(text for text in texts if text)
