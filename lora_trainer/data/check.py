"""Looks once at every file of a list, in threads, through the index: which are whole, and what is wrong with the
others.

Memory stays flat: each worker holds one file, and only one of them a large picture (images.py).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..config.fields import printable
from ..errors import t
from ..modality import Progress
from .images import BadImage, ImageFacts, inspect, too_large
from .index import FileIndex, Row

_ROWS_PER_WRITE = 256


def no_progress(phase: str, done: int, total: int) -> None:
    """Says nothing."""


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
