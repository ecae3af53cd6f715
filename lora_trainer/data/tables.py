"""Rows of CSV and Parquet files.

The separator is the one that the header uses (`,`, `;` or TAB, or what Excel's `sep=` line says); a quoted cell may
hold line breaks. An empty cell is empty text, never "nan". Parquet needs pyarrow, an optional extra.
"""

import csv
import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

from ..errors import DataError, t
from .json_rows import FileRows

_SEPARATOR_LINE = re.compile(r"sep=(.)\n", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')
_LARGEST_CELL = 2**31 - 1
SAID_BY = ("role", "from", "speaker", "papel")
"""Keys that tell who speaks in a message, the usual first."""


def read_csv(text: str, name: str, *, strict: bool = True) -> FileRows:
    """`strict`: a misplaced quote is a fault; else it is read as best it may."""
    out = FileRows(name)
    csv.field_size_limit(_LARGEST_CELL)
    said = _SEPARATOR_LINE.match(text)
    skipped = 1 if said else 0
    text = text[said.end() :] if said else text
    header_line = _QUOTED.sub("", text.lstrip("\n").split("\n", 1)[0])
    separator = said[1] if said else max(",;\t", key=header_line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=strict)
    header: list[str] = []
    line = skipped + 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                if header:
                    _take(cells, header, separator, line, out)
                else:
                    header = [cell.strip() for cell in cells]
                    if twice := next((cell for cell in header if cell and header.count(cell) > 1), None):
                        out.fail(line, t(pt=f"duas colunas se chamam {twice}", en=f"two columns are called {twice}"))
                        return out
            line = reader.line_num + skipped + 1
    except csv.Error as error:
        out.fail(line, _explained(str(error)))
    return out


def _take(cells: list[str], header: list[str], separator: str, line: int, out: FileRows) -> None:
    if len(cells) == len(header):
        out.add(line, dict(zip(header, cells, strict=True)))
        return
    out.fail(
        line,
        t(
            pt=f"{len(cells)} campos, mas o cabeçalho tem {len(header)}; se o texto tem `{separator}`, "
            "ponha-o entre aspas",
            en=f"{len(cells)} fields, but the header has {len(header)}; if the text holds `{separator}`, "
            "put it in quotes",
        ),
    )


def _explained(message: str) -> str:
    if "unexpected end of data" in message:
        return t(
            pt="uma aspa aberta nesta linha não fecha até o fim do arquivo",
            en="a quote opened on this line is not closed before the end of the file",
        )
    return t(
        pt=f"aspas mal colocadas ({message}); dentro de um texto entre aspas, escreva cada aspa duas vezes",
        en=f"misplaced quotes ({message}); inside a quoted text, write each quote twice",
    )


def read_parquet(path: Path, name: str) -> FileRows:
    try:
        pyarrow, parquet = (importlib.import_module(module) for module in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise DataError.said(
            pt="ler Parquet precisa do pacote pyarrow",
            en="reading Parquet needs the package pyarrow",
            hint_pt="`pip install pyarrow`, ou converta o arquivo para .jsonl",
            hint_en="`pip install pyarrow`, or convert the file to .jsonl",
            where=name,
        ) from error
    out = FileRows(name)
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                out.add(len(out.rows) + len(out.problems) + 1, _without_nulls(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            t(pt=f"arquivo Parquet que não consigo ler: {error}", en=f"unreadable Parquet file: {error}"), where=name
        ) from error
    return out


def _without_nulls(value: Any) -> Any:
    """Parquet fills the fields that a row lacks with nulls."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def parsed_cell(value: Any, *, chat: bool) -> Any:
    """CSV and Parquet have no lists of messages; people keep them there as JSON text.

    Outside of a chat's own column, a list is text (the answer "[1, 2]") unless it is plainly of messages.
    """
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    messages = all(isinstance(item, dict) and any(key in item for key in SAID_BY) for item in found)
    return found if chat or (found and messages) else value
