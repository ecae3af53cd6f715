"""Paths of a config: made absolute against the folder of the file they were written in, then checked all at once.

From the command line they are relative to where the command runs. Nothing here opens or creates a file, except
`prepare_output`, which training calls first.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import MachineError, t
from ..files import arch
from . import names
from .entries import Entry
from .fields import has_escapes
from .names import Key
from .report import Problem, Source

_SHAPE = re.compile(r"[\w.-]+")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_FILE_ENDINGS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


@dataclass
class Outcome:
    problems: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failed: set[Key] = field(default_factory=set)

    def note(self, entry: Entry, *, pt: str, en: str) -> None:
        self.notices.append(f"{entry.where.origin()}: {t(pt=pt, en=en)}")


def resolve_paths(values: dict[Key, Any], entries: Mapping[Key, Entry], main: Source) -> Outcome:
    """Replace the paths in `values` by absolute ones, and say which are not there."""
    outcome = Outcome()
    for key, option in names.options().items():
        value = values.get(key)
        if option.kind in names.PATH_KINDS and isinstance(value, str) and not has_escapes(value):
            values[key], problem = _resolve(value, entries[key], outcome)
            if problem:
                outcome.problems.append(problem)
                outcome.failed.add(key)
    if ("output", "dir") not in entries:
        values["output", "dir"] = absolute(names.options()["output", "dir"].default, main.base_dir)
    return outcome


def absolute(text: str, base: Path) -> str:
    return os.path.abspath(os.path.join(base, os.path.expanduser(text)))


def looks_like_path(text: str, base: Path) -> bool:
    """True for what can only be a path, exists, or starts in a folder that exists; `owner/name` otherwise."""
    if text.startswith((".", "/", "~")) or "\\" in text or _DRIVE.match(text) or text.lower().endswith(_FILE_ENDINGS):
        return True
    return os.path.exists(absolute(text, base)) or os.path.isdir(absolute(text.split("/")[0], base))


def _resolve(value: str, entry: Entry, outcome: Outcome) -> tuple[str, Problem | None]:
    """(the path made absolute, what is wrong with it)."""
    text, base, written = value.strip(), entry.source.base_dir, entry.written
    if text != value:
        outcome.note(entry, pt=f"espaço sobrando em `{written}` ignorado", en=f"stray space in `{written}` ignored")
    if not text:
        hint = t(pt="escreva o caminho ou apague a linha", en="write the path or delete it")
        return value, Problem.at(entry.where, pt=f"`{written}` está vazio", en=f"`{written}` is empty", hint=hint)
    if entry.option.key == ("model", "architecture") and (shipped := _shipped(text)):
        return shipped, None
    if os.name != "nt" and _DRIVE.match(text):
        return text, _other_computer(text, entry)
    if os.name != "nt" and "\\" in text and not os.path.exists(absolute(text, base)):
        text = text.replace("\\", "/")
        outcome.note(entry, pt=f"`{value}` lido como `{text}`", en=f"`{value}` read as `{text}`")
    path = absolute(text, base)
    if entry.option.kind == "path_or_hub" and not looks_like_path(text, base):
        return text, None if _HUB_ID.fullmatch(text) else _neither(text, entry, path)
    return path, _unwritable(path, entry) if entry.option.kind == "output_folder" else _absent(path, entry)


def _shipped(name: str) -> str | None:
    """The folder of config files that is known by a name."""
    found = arch.folder(name) if _SHAPE.fullmatch(name) else None
    return str(found) if found else None


def _absent(path: str, entry: Entry) -> Problem | None:
    if not os.path.exists(path):
        hint = near_matches(Path(path))
        if entry.option.key == ("model", "architecture"):
            known = ", ".join(arch.releases())
            hint = t(pt=f"uma pasta, ou um destes nomes: {known}", en=f"a folder, or one of these names: {known}")
        written = f"`{entry.written}`"
        return Problem.at(entry.where, pt=f"{written} não existe: {path}", en=f"{written} does not exist: {path}", hint=hint)
    if entry.option.kind == "folder" and not os.path.isdir(path):
        return Problem.at(
            entry.where,
            pt=f"`{entry.written}` é um arquivo, e aqui vai uma pasta: {path}",
            en=f"`{entry.written}` is a file, and a folder belongs here: {path}",
            hint=t(pt=f"a pasta dele é {os.path.dirname(path)}", en=f"its folder is {os.path.dirname(path)}"),
        )
    return None


def near_matches(path: Path) -> str:
    """A hint with what lies beside a missing path, or with the first folder of it that is missing."""
    parent, child = path.parent, path
    while not parent.is_dir() and parent != parent.parent:
        parent, child = parent.parent, parent
    try:
        beside = sorted(p.name for p in parent.iterdir())
    except OSError:
        beside = []
    if near := names.nearest(child.name, beside, 0.6):
        return t(pt=f"ao lado existe `{near}`", en=f"beside it there is `{near}`")
    if child != path:
        return t(pt=f"a pasta {child} não existe", en=f"the folder {child} does not exist")
    same_kind = [name for name in beside if Path(name).suffix == path.suffix and not name.startswith(".")][:5]
    if same_kind:
        return t(pt=f"em {parent} há: ", en=f"in {parent} there are: ") + ", ".join(same_kind)
    return t(pt=f"a pasta {parent} existe, mas não tem nada parecido", en=f"{parent} exists, but holds nothing like it")


def _other_computer(text: str, entry: Entry) -> Problem:
    return Problem.at(
        entry.where,
        pt=f"`{entry.written}` é um caminho de outro computador (Windows): {text}",
        en=f"`{entry.written}` is a path of another computer (Windows): {text}",
        hint=t(pt="escreva onde isso está nesta máquina", en="write where it is on this machine"),
    )


def _neither(text: str, entry: Entry, path: str) -> Problem:
    return Problem.at(
        entry.where,
        pt=f"`{entry.written}`: não existe {path}, e `{text}` não é um id do Hugging Face (`dono/nome`)",
        en=f"`{entry.written}`: {path} does not exist, and `{text}` is no Hugging Face id (`owner/name`)",
        hint=near_matches(Path(path)),
    )


def _unwritable(path: str, entry: Entry) -> Problem | None:
    """What can be known without writing; `prepare_output` tries for real."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        pt, en = f"{folder} é um arquivo, e aqui vai uma pasta", f"{folder} is a file, and a folder belongs here"
    elif not os.access(folder, os.W_OK | os.X_OK):
        pt, en = f"sem permissão para gravar em {folder}", f"no permission to write in {folder}"
    else:
        return None
    hint = t(pt="escolha outra pasta", en="choose another folder")
    return Problem.at(entry.where, pt=f"`{entry.written}`: {pt}", en=f"`{entry.written}`: {en}", hint=hint)


def prepare_output(folder: Path) -> None:
    """Create the run folder and prove that it takes a file, before anything long begins."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        shown = names.options()["output", "dir"].shown()
        raise MachineError.said(
            pt=f"não consigo gravar em {folder} ({error.strerror})",
            en=f"cannot write in {folder} ({error.strerror})",
            hint_pt=f"escolha outra pasta em `{shown}`",
            hint_en=f"choose another folder in `{shown}`",
        ) from error
