"""A file is either the old one or the new one, whatever happens while it is written."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. At the end it is on disk and takes the place; after any failure it is gone.

    Raises OSError as writing does.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none, or a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_json(path: Path, value: Any) -> None:
    """What may be forgotten: a folder that cannot be written costs time, no more."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def write_json(path: Path, value: Any) -> None:
    """Atomic: the file is either the old one or the new one."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")
