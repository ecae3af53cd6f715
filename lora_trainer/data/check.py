"""Looks once at every file of a list, in threads: which are whole, and what is wrong with the others.

What was found is remembered in an index, (path, size, mtime) -> facts, so that a second start opens no image: SQLite with
its ordinary rollback journal, as two runs may share it, and network folders cope with it better than with WAL. Bad files
are not remembered; they are looked at again each time. A damaged index is thrown away: it holds nothing that cannot be
found again. Memory stays flat: each worker holds one file, and only one of them a large picture (images.py).
"""

import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..config.fields import printable
from ..config.names import shown
from ..errors import DataError, t
from ..modality import Progress, no_progress
from .images import BadImage, ImageFacts, inspect, too_large

_ROWS_PER_WRITE = 256
_TABLE = "files_1"
"""The number changes when `inspect` learns to notice more."""
Row = tuple[str, int, int, ImageFacts]
"""Absolute path (printable), size in bytes, mtime in nanoseconds, facts."""


class FileIndex:
    def __init__(self, cache_dir: Path) -> None:
        path = cache_dir / "index.sqlite3"
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            try:
                self._connection = _connect(path)
            except sqlite3.OperationalError:  # locked or read-only, not damaged
                raise
            except sqlite3.DatabaseError:
                path.unlink()
                self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(cache_dir, error) from error
        self._folder = cache_dir

    def get(self, path: str, size: int, mtime_ns: int) -> ImageFacts | None:
        query = f"SELECT content, width, height, notes FROM {_TABLE} WHERE path = ? AND size = ? AND mtime_ns = ?"
        row = self._connection.execute(query, (path, size, mtime_ns)).fetchone()
        return ImageFacts(row[0], (row[1], row[2]), frozenset(filter(None, row[3].split(",")))) if row else None

    def put(self, rows: Iterable[Row]) -> None:
        values = [(p, s, m, f.content, *f.size, ",".join(sorted(f.notes))) for p, s, m, f in rows]
        try:
            with self._connection:
                self._connection.executemany(f"INSERT OR REPLACE INTO {_TABLE} VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            raise _unusable(self._folder, error) from error

    def close(self) -> None:
        self._connection.close()


def _unusable(folder: Path, error: Exception) -> DataError:
    return DataError.said(
        pt=f"não consigo usar a pasta de cache {folder}: {error}",
        en=f"cannot use the cache folder {folder}: {error}",
        hint_pt="escolha outra em dados.diretorio_cache",
        hint_en="choose another in data.cache_dir",
        where=shown("data", "cache_dir"),
    )


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60.0)
    try:
        with connection:
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {_TABLE} (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, "
                "content TEXT, width INTEGER, height INTEGER, notes TEXT)"
            )
        connection.execute(f"SELECT count(*) FROM {_TABLE}").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def check_files(
    paths: Sequence[Path], index: FileIndex, max_pixels: int, progress: Progress = no_progress
) -> tuple[dict[Path, ImageFacts], dict[Path, str]]:
    """(facts of the good files, reasons of the bad ones)."""
    facts = {path: known for path in paths if (known := _known(path, index)) is not None}
    bad = {path: too_large(_pixels(fact), max_pixels) for path, fact in facts.items() if _pixels(fact) > max_pixels}
    unknown = [path for path in paths if path not in facts]
    fresh: list[Row] = []
    workers = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        results = workers.map(lambda path: _look(path, max_pixels), unknown)
        for done, (path, result) in enumerate(zip(unknown, results, strict=True), 1):
            if isinstance(result, str):
                bad[path] = result
            else:
                facts[path] = result[3]
                fresh.append(result)
            if len(fresh) >= _ROWS_PER_WRITE:
                index.put(fresh)
                fresh.clear()
            progress("check", done, len(unknown))
    finally:
        workers.shutdown(cancel_futures=True)
        index.put(fresh)
    return {path: facts[path] for path in paths if path in facts and path not in bad}, bad


def _known(path: Path, index: FileIndex) -> ImageFacts | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return index.get(_key(path), stat.st_size, stat.st_mtime_ns)


def _look(path: Path, max_pixels: int) -> Row | str:
    """In a worker thread: the facts, or why the file is bad."""
    try:
        stat = path.stat()
        return _key(path), stat.st_size, stat.st_mtime_ns, inspect(path, max_pixels)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return t(pt=f"não pôde ser lido ({error.strerror})", en=f"cannot be read ({error.strerror})")


def _key(path: Path) -> str:
    """SQLite takes no lone surrogates, which stand for bytes that are not UTF-8."""
    return printable(str(path.resolve()))


def _pixels(facts: ImageFacts) -> int:
    return facts.size[0] * facts.size[1]
