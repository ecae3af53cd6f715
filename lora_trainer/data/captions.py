"""Which text belongs to an image.

The order, first non-empty wins: `.txt` > `.caption` > metadata.jsonl/.csv > default.txt > the class words of a kohya
folder > the trigger word. File names match in any case. The nearest table and the nearest default.txt (own folder,
then its parents up to the data folder) count. A caption file of several lines is one caption. What changes from epoch
to epoch (shuffling, dropout) is in variants.py.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config.schema import DataConfig
from ..errors import t
from .metadata import NAMES, Table, lookalikes, read_table
from .notes import Notes, counted, naming
from .text import decode
from .walk import Folder, Found, nfc

_PLACEHOLDER = "[trigger]"


@dataclass(frozen=True)
class Caption:
    texts: tuple[str, ...]
    """Never empty: several are drawn from at random; "" trains without a caption."""
    source: str
    """The file it came from, else "folder", "trigger" or "none"."""

    @property
    def own(self) -> bool:
        """Somebody wrote it, rather than it being filled in."""
        return self.source not in ("folder", "trigger", "none")


class CaptionReader:
    """Reads the captions of one walked folder; `finish` tells what it met."""

    def __init__(self, found: Found, config: DataConfig, notes: Notes, trigger: str | None) -> None:
        self.found, self.notes, self.trigger = found, notes, trigger
        self.separator = config.separator
        self._folders = {folder.path: folder for folder in found.folders}
        self._names = Counter(nfc(image.name) for folder in found.folders for image in folder.images)
        self._guessed: list[tuple[str, str]] = []
        self._placeholders: list[str] = []
        self._rows_used: dict[Path, set[str]] = {}
        self._without_row: dict[Path, list[str]] = {}
        self._tables = {folder.path: self._table(folder, config.caption_column) for folder in found.folders}

    def read(self, image: Path, class_words: str) -> Caption:
        texts, source = self._find(image)
        if not texts and class_words:
            texts, source = (class_words,), "folder"
        if not texts:
            texts, source = ("",), "trigger" if self.trigger else "none"
        return Caption(tuple(self._with_trigger(text, image) for text in texts), source)

    def finish(self) -> None:
        if self._guessed:
            shown = "; ".join(f"{name}: {text[:60]!r}" for name, text in self._guessed[:3])
            names = naming([name for name, _ in self._guessed])
            self.notes.warn(
                pt=f"legendas que não estão em UTF-8, lidas como Windows-1252: {names}. Confira: {shown}",
                en=f"captions that are not UTF-8, read as Windows-1252: {names}. Please check: {shown}",
            )
        if self._placeholders:
            self.notes.warn(
                pt=f"[trigger] aparece em {naming(self._placeholders)}, mas dados.palavra_gatilho não foi definida",
                en=f"[trigger] appears in {naming(self._placeholders)}, but data.trigger is not set",
            )
        for table in filter(None, self._tables.values()):
            self._report_table(table)
        for path in (folder.others[name] for folder in self.found.folders for name in lookalikes(folder.others)):
            self.notes.warn(
                pt=f"{self.found.name(path)} não foi lido: o nome esperado é metadata.jsonl ou metadata.csv",
                en=f"{self.found.name(path)} was not read: the name expected is metadata.jsonl or metadata.csv",
            )

    # -- finding

    def _find(self, image: Path) -> tuple[tuple[str, ...], str]:
        stem, folders = nfc(image.stem).lower(), [f for f in self._upwards(image.parent) if f in self._folders]
        own = self._text_of(image.parent, f"{stem}.txt") or self._text_of(image.parent, f"{stem}.caption") or self._row(image)
        shared = (self._text_of(folder, "default.txt") for folder in folders)
        return own or next(filter(None, shared), ((), ""))

    def _text_of(self, folder: Path, name: str) -> tuple[tuple[str, ...], str] | None:
        path = self._folders[folder].others.get(name)
        text = self._file_text(path) if path else ""
        return ((text,), self.found.name(path)) if path and text else None

    def _upwards(self, folder: Path) -> Iterable[Path]:
        yield folder
        while folder != self.found.root and folder.parent != folder:
            folder = folder.parent
            yield folder

    def _row(self, image: Path) -> tuple[tuple[str, ...], str] | None:
        for folder in self._upwards(image.parent):
            table = self._tables.get(folder)
            if table is None:
                continue
            key = nfc(image.relative_to(folder).as_posix())
            if key not in table.captions and self._names[nfc(image.name)] == 1:
                key = nfc(image.name)
            if key in table.captions:
                self._rows_used.setdefault(table.path, set()).add(key)
                texts = table.captions[key]
                return (texts, self.found.name(table.path)) if texts else None
            self._without_row.setdefault(table.path, []).append(self.found.name(image))
            return None
        return None

    def _file_text(self, path: Path) -> str:
        try:
            decoded = decode(path.read_bytes())
        except OSError as error:
            name = self.found.name(path)
            self.notes.fail(
                t(
                    pt=f"legenda ilegível: {name} ({error.strerror})",
                    en=f"unreadable caption: {name} ({error.strerror})",
                )
            )
            return ""
        text = nfc(" ".join(decoded.text.split()))
        if decoded.encoding == "cp1252" and all(name != self.found.name(path) for name, _ in self._guessed):
            self._guessed.append((self.found.name(path), text))
        return text

    def _table(self, folder: Folder, column: str | None) -> Table | None:
        path = next((folder.others[name] for name in NAMES if name in folder.others), None)
        if path is None:
            return None
        table = read_table(path, self.found.name(path), column)
        for problem in table.problems:
            self.notes.fail(problem)
        if table.guessed:
            self._guessed.append((self.found.name(path), table.guessed))
        return table

    # -- the trigger word

    def _with_trigger(self, text: str, image: Path) -> str:
        if not self.trigger:
            if _PLACEHOLDER in text:
                self._placeholders.append(self.found.name(image))
            return text
        text = text.replace(_PLACEHOLDER, self.trigger)
        if has_word(text, self.trigger):
            return text
        return joined([self.trigger, text], self.separator) if text else self.trigger

    # -- telling

    def _report_table(self, table: Table) -> None:
        name = self.found.name(table.path)
        unused = [row for row in table.captions if row not in self._rows_used.get(table.path, set())]
        without = self._without_row.get(table.path, [])
        if table.repeated:
            self.notes.warn(
                pt=f"{name}: mais de uma linha para a mesma imagem; vale a última: {naming(table.repeated)}",
                en=f"{name}: more than one row for the same image; the last one counts: {naming(table.repeated)}",
            )
        if unused and not table.problems:
            self.notes.warn(
                pt=f"{name}: {counted(len(unused), 'linha', 'linhas')} sem uso (imagem ausente ou com .txt): "
                + naming(unused),
                en=f"{name}: {counted(len(unused), 'row', 'rows')} unused (no such image, or it has a .txt): "
                + naming(unused),
            )
        if without and not table.problems:
            self.notes.warn(
                pt=f"{name}: {counted(len(without), 'imagem', 'imagens')} sem linha: {naming(without)}",
                en=f"{name}: {counted(len(without), 'image', 'images')} without a row: {naming(without)}",
            )


def has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def joined(tags: list[str], separator: str) -> str:
    """Tags with the user's separator between them, and one space after it."""
    mark = separator.strip()
    return (f"{mark} " if mark else separator).join(tags)
