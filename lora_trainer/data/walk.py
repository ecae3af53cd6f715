"""Finds the files of a data folder: the images, the texts beside them, and what had to be left alone.

The rule: hidden names, `__MACOSX` and the trainer's own folders, wherever they lie, are skipped; links to folders are
followed, after the real folders and each real folder once, so a loop ends by itself. Suffixes count in any case, and
choose only which files are opened: what a file is, its content decides (images.py). Not read: the kohya metadata JSON
of whole data sets.
"""

import importlib.util
import re
import unicodedata
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from PIL import features

from ..config.fields import printable
from ..errors import t
from .text import decode_name


def _suffixes(names: str) -> frozenset[str]:
    return frozenset(f".{name}" for name in names.split())


_PILLOW = _suffixes("jpg jpeg jpe jfif png webp bmp dib gif tif tiff ppm pgm avif")
_HEIC = _suffixes("heic heif hif")
_OTHERS = _suffixes("jxl svg psd xcf raw cr2 cr3 nef arw dng orf rw2 jp2 ico tga exr hdr mp4 mov")
MASK_ENDING = "-masklabel"
_REPEATS = re.compile(r"(\d+)_(.*)", re.DOTALL)
_MOVED_ASIDE = re.compile(r"\.antigo-\d+$")
_MOST_REPEATS = 1000
"""A larger number before `_` is a year or a date, not a repeat count."""


@dataclass
class Folder:
    path: Path
    images: list[Path] = field(default_factory=list)
    others: dict[str, Path] = field(default_factory=dict)
    """Everything else, by lower-case NFC name."""


@dataclass
class Found:
    root: Path
    folders: list[Folder] = field(default_factory=list)
    masks: dict[str, Path] = field(default_factory=dict)
    """Files named `name-masklabel.*`, by `masked_path` of the image they belong to."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    skipped_subfolders: int = 0
    runs: list[str] = field(default_factory=list)
    """Run folders of ours: their previews are no training images."""

    def name(self, path: Path) -> str:
        """For people and for hashing: any file system's name as text that can be written anywhere."""
        return printable(nfc(path.relative_to(self.root).as_posix()))


def nfc(text: str) -> str:
    """macOS stores `ã` as two characters; names and captions are compared and kept composed."""
    return unicodedata.normalize("NFC", text)


def stem_key(path: Path) -> str:
    return nfc(str(path.with_suffix(""))).lower()


def readable_suffixes() -> frozenset[str]:
    suffixes = _PILLOW if features.check("avif") else _PILLOW - {".avif"}
    return suffixes | _HEIC if importlib.util.find_spec("pillow_heif") else suffixes


def walk(
    root: Path, *, recursive: bool = True, exclude: Iterable[Path] = (), suffixes: frozenset[str] | None = None
) -> Found:
    found = Found(root)
    suffixes = readable_suffixes() if suffixes is None else suffixes
    seen = {path.resolve() for path in exclude if path.resolve() != root.resolve()}
    waiting, links = deque([root]), deque[Path]()
    while waiting or links:
        path = waiting.popleft() if waiting else links.popleft()
        real = path.resolve()
        if real in seen:
            continue
        seen.add(real)
        subfolders = _read_folder(path, found, suffixes)
        if not recursive:
            found.skipped_subfolders = len(subfolders)
            break
        waiting.extend(folder for folder in subfolders if not folder.is_symlink())
        links.extend(folder for folder in subfolders if folder.is_symlink())
    found.folders.sort(key=lambda folder: nfc(folder.path.as_posix()))
    return found


def _read_folder(path: Path, found: Found, suffixes: frozenset[str]) -> list[Path]:
    """Sort one folder's files into `found`; returns its sub-folders."""
    try:
        entries = sorted(path.iterdir(), key=lambda entry: nfc(entry.name))
    except OSError as error:
        found.unreadable.append((found.name(path) + "/", error.strerror or str(error)))
        return []
    folder, subfolders = Folder(path), []
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            continue
        if entry.is_dir():
            if is_run_folder(entry):
                found.runs.append(found.name(entry))
            else:
                subfolders.append(entry)
        elif entry.suffix.lower() in suffixes:
            _take_image(entry, folder, found)
        else:
            folder.others[nfc(entry.name).lower()] = entry
            if entry.suffix.lower() in _OTHERS | _HEIC | {".avif"}:
                found.unsupported.append(found.name(entry))
    found.folders.append(folder)
    return subfolders


def is_run_folder(path: Path) -> bool:
    """Made by this program (journal/run_folder.py): it holds the run's state and log, or was moved aside by a later run."""
    state = path / "estado"
    return bool(_MOVED_ASIDE.search(path.name)) or (
        state.is_dir() and ((path / "metricas.jsonl").is_file() or (state / "execucao.json").is_file())
    )


def _take_image(entry: Path, folder: Folder, found: Found) -> None:
    if entry.is_symlink() and not entry.exists():
        found.unreadable.append((found.name(entry), t(pt="atalho quebrado", en="broken link")))
    elif entry.stem.lower().endswith(MASK_ENDING):
        found.masks[stem_key(entry)[: -len(MASK_ENDING)]] = entry
    else:
        folder.images.append(entry)


def folder_repeats(folder: Path, root: Path) -> tuple[int | None, str]:
    """kohya's `10_ohwx gato` -> (10, "ohwx gato"), from the nearest folder that has such a name; else (None, "")."""
    while True:
        match = _REPEATS.fullmatch(nfc(folder.name))
        if match and int(match[1]) <= _MOST_REPEATS:
            return int(match[1]), nfc(decode_name(match[2])).strip()
        if folder == root or folder.parent == folder:
            return None, ""
        folder = folder.parent


def large_number(folder: Path) -> int | None:
    """The number of a name like `99999_muito`, which looks like a repeat count and is none; years and dates are not
    meant."""
    match = _REPEATS.fullmatch(nfc(folder.name))
    number = int(match[1]) if match else 0
    if number <= _MOST_REPEATS or 1900 <= number <= 2100 or re.fullmatch(r"(19|20)\d{4}(\d\d)?", str(number)):
        return None
    return number
