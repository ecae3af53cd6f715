"""Problems with their place in the source, told all at once in the manner of a compiler.

The command line counts as a source: one "line" per argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ErrorReport, t
from .fields import printable

MAX_LINE_WIDTH = 120
"""Longer source lines are cut around the place in question."""
Both = tuple[str, str]
"""A text in Portuguese and in English."""


def filled(text: Both, told: Mapping[str, Any]) -> str:
    """The text in the language in force, with what stands for its names."""
    return t(pt=text[0], en=text[1]).format(**told)


@dataclass(frozen=True)
class Source:
    """A text that sets options. Paths written in it are relative to `base_dir`."""

    title: str
    """As reports show it: the path the user gave, or "linha de comando"."""
    label: str
    """As origins show it: the file's name alone, so that no personal path ends up in a published file."""
    lines: tuple[str, ...]
    base_dir: Path
    is_file: bool = True


@dataclass(frozen=True)
class Where:
    """A stretch of one line; line and columns count from 0. line < 0: the source as a whole."""

    source: Source
    line: int = -1
    start: int = 0
    end: int = 0

    def origin(self) -> str:
        """`meu.yaml:12`, or `linha de comando`."""
        return f"{self.source.label}:{self.line + 1}" if self.source.is_file and self.line >= 0 else self.source.label

    def place(self) -> str:
        if not self.source.is_file or self.line < 0:
            return self.source.title
        return f"{self.source.title}:{self.line + 1}:{self.start + 1}"


@dataclass(frozen=True)
class Problem:
    message: str
    where: Where | None = None
    hint: str = ""
    also: Where | None = None
    """A second place that takes part: the first of two duplicates, the other key of a contradiction."""

    @classmethod
    def at(cls, where: Where | None, *, pt: str, en: str, hint: str = "", also: Where | None = None) -> "Problem":
        return cls(t(pt=pt, en=en), where, hint, also)


def command_line(arguments: Sequence[str], cwd: Path) -> Source:
    title = t(pt="linha de comando", en="command line")
    return Source(title, title, tuple(arguments), cwd, is_file=False)


def render(problem: Problem) -> str:
    lines = [f"{t(pt='erro', en='error')}: {problem.message}"]
    if problem.where:
        lines += _excerpt(problem.where)
    if problem.also:
        lines += _excerpt(problem.also, t(pt="e também ", en="and also "))
    if problem.hint:
        lines.append(f"   = {t(pt='dica', en='hint')}: {problem.hint}")
    return "\n".join(lines)


def report(problems: Sequence[Problem], title: str) -> ErrorReport:
    """Every problem, in the order of its place, with a count at the end."""
    titles = list(dict.fromkeys(p.where.source.title for p in problems if p.where))
    ordered = sorted(
        problems, key=lambda p: (titles.index(p.where.source.title), p.where.line) if p.where else (-1, -1)
    )
    texts = list(dict.fromkeys(render(problem) for problem in ordered))
    count = len(texts)
    plural = "s" if count > 1 else ""
    last = t(
        pt=f"{count} problema{plural} em {title}; nada foi iniciado.",
        en=f"{count} problem{plural} in {title}; nothing was started.",
    )
    return ErrorReport(printable("\n\n".join([*texts, last])))


def _excerpt(where: Where, prefix: str = "") -> list[str]:
    lines = [f"  --> {prefix}{where.place()}"]
    if not 0 <= where.line < len(where.source.lines):
        return lines
    text = "".join(c if c.isprintable() else "→" if c == "\t" else "?" for c in where.source.lines[where.line])
    text, start, end = _cut(text, where.start, where.end)
    number = str(where.line + 1) if where.source.is_file else ">"
    margin = " " * len(number)
    return [*lines, f" {number} | {text}", f" {margin} | {' ' * start}{'^' * max(1, end - start)}"]


def _cut(text: str, start: int, end: int) -> tuple[str, int, int]:
    end = min(max(end, start + 1), max(len(text), start + 1))
    if len(text) <= MAX_LINE_WIDTH:
        return text, start, end
    left = max(0, start - MAX_LINE_WIDTH // 4)
    shown = ("…" if left else "") + text[left : left + MAX_LINE_WIDTH]
    shift = left - (1 if left else 0)
    return shown, start - shift, min(end - shift, len(shown))
