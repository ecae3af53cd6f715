"""Remembers what `inspect` found, so that a second start opens no image: (path, size, mtime) -> facts.

SQLite with its ordinary rollback journal: two runs may share it, and network folders cope with it better than with WAL.
Bad files are not remembered; they are looked at again each time. A damaged index is thrown away: it holds nothing that
cannot be found again.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from ..config.names import shown
from ..errors import DataError
from .images import ImageFacts

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
