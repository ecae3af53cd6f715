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


def resolve_paths(values: dict[Key, Any], entries: Mapping[Key, Entry], main: Source) -> Outcome:
    """Replace the paths in `values` by absolute ones, and say which are not there."""
    outcome = Outcome()
    for key, option in names.options().items():
        value = values.get(key)
        if option.kind in names.PATH_KINDS and isinstance(value, str) and not has_escapes(value):
            before = len(outcome.problems)
            values[key] = _resolve(value, entries[key], outcome)
            if len(outcome.problems) > before:
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


def _resolve(value: str, entry: Entry, outcome: Outcome) -> str:
    text = value.strip()
    base = entry.source.base_dir
    if text != value:
        outcome.notices.append(
            entry.where.origin()
            + t(pt=f": espaço sobrando em `{entry.written}` ignorado", en=f": stray space in `{entry.written}` ignored")
        )
    if not text:
        outcome.problems.append(_empty(entry))
        return value
    if entry.option.key == ("model", "architecture") and (shipped := _shipped(text)):
        return shipped
    if os.name != "nt" and _DRIVE.match(text):
        outcome.problems.append(_other_computer(text, entry))
        return text
    if os.name != "nt" and "\\" in text and not os.path.exists(absolute(text, base)):
        text = text.replace("\\", "/")
        outcome.notices.append(
            entry.where.origin() + t(pt=f": `{value}` lido como `{text}`", en=f": `{value}` read as `{text}`")
        )
    if entry.option.kind == "path_or_hub" and not looks_like_path(text, base):
        if not _HUB_ID.fullmatch(text):
            outcome.problems.append(_neither(text, entry, absolute(text, base)))
        return text
    path = absolute(text, base)
    if problem := _check(path, entry):
        outcome.problems.append(problem)
    return path


def _shipped(name: str) -> str | None:
    """The folder of config files that is known by a name."""
    found = arch.folder(name) if _SHAPE.fullmatch(name) else None
    return str(found) if found else None


def _check(path: str, entry: Entry) -> Problem | None:
    if entry.option.kind == "output_folder":
        return _unwritable(path, entry)
    if not os.path.exists(path):
        hint = near_matches(Path(path))
        if entry.option.key == ("model", "architecture"):
            names = ", ".join(arch.releases())
            hint = t(pt=f"uma pasta, ou um destes nomes: {names}", en=f"a folder, or one of these names: {names}")
        return _problem(entry, path, t(pt="não existe", en="does not exist"), hint)
    if entry.option.kind == "folder" and not os.path.isdir(path):
        return _problem(
            entry, path, t(pt="é um arquivo, e aqui vai uma pasta", en="is a file, and a folder belongs here"),
            t(pt=f"a pasta dele é {os.path.dirname(path)}", en=f"its folder is {os.path.dirname(path)}"),
        )  # fmt: skip
    return None


def _problem(entry: Entry, path: str, what: str, hint: str = "") -> Problem:
    return Problem(f"`{entry.written}` {what}: {path}", entry.where, hint)


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


def _empty(entry: Entry) -> Problem:
    message = t(pt=f"`{entry.written}` está vazio", en=f"`{entry.written}` is empty")
    return Problem(message, entry.where, t(pt="escreva o caminho ou apague a linha", en="write the path or delete it"))


def _other_computer(text: str, entry: Entry) -> Problem:
    return Problem(
        t(
            pt=f"`{entry.written}` é um caminho de outro computador (Windows): {text}",
            en=f"`{entry.written}` is a path of another computer (Windows): {text}",
        ),
        entry.where,
        t(pt="escreva onde isso está nesta máquina", en="write where it is on this machine"),
    )


def _neither(text: str, entry: Entry, path: str) -> Problem:
    return Problem(
        t(
            pt=f"`{entry.written}`: não existe {path}, e `{text}` não é um id do Hugging Face (`dono/nome`)",
            en=f"`{entry.written}`: {path} does not exist, and `{text}` is no Hugging Face id (`owner/name`)",
        ),
        entry.where,
        near_matches(Path(path)),
    )


def _unwritable(path: str, entry: Entry | None) -> Problem | None:
    """What can be known without writing; `prepare_output` tries for real."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    where = entry.where if entry else None
    written = entry.written if entry else names.options()["output", "dir"].shown()
    if not folder.is_dir():
        message = t(
            pt=f"`{written}`: {folder} é um arquivo, e aqui vai uma pasta",
            en=f"`{written}`: {folder} is a file, and a folder belongs here",
        )
        return Problem(message, where, t(pt="escolha outra pasta", en="choose another folder"))
    if not os.access(folder, os.W_OK | os.X_OK):
        message = t(
            pt=f"`{written}`: sem permissão para gravar em {folder}",
            en=f"`{written}`: no permission to write in {folder}",
        )
        return Problem(message, where, t(pt="escolha outra pasta", en="choose another folder"))
    return None


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
        raise MachineError(
            t(
                pt=f"não consigo gravar em {folder} ({error.strerror})",
                en=f"cannot write in {folder} ({error.strerror})",
            ),
            t(pt=f"escolha outra pasta em `{shown}`", en=f"choose another folder in `{shown}`"),
        ) from error
