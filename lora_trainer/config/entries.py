"""One option as a source set it, and what can be said against it while reading."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import t
from . import names
from .names import Key, Option
from .report import Problem, Source, Where

NULLS = ("", "~", "null", "Null", "NULL")
_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Entry:
    """An option set by a source. Scalars in `value` are the text written; None is YAML's null."""

    option: Option
    written: str
    value: Any
    key_where: Where
    where: Where
    items: tuple[Where, ...] = ()
    refused: bool = False
    """Already complained about: nothing more is to be said of its value."""

    @property
    def source(self) -> Source:
        return self.where.source


@dataclass
class Sheet:
    """What one source says."""

    source: Source
    entries: dict[Key, Entry] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    extends: list[tuple[str, Where]] = field(default_factory=list)
    section_places: dict[str, Where] = field(default_factory=dict)
    families: dict[str, "Sheet"] = field(default_factory=dict)
    """What the source says for bases of one family only; stronger than what it says for all."""
    sizes: dict[float, "Sheet"] = field(default_factory=dict)
    """What a family's sheet says for bases of up to so many billion parameters; stronger still."""
    broken: bool = False
    """Part of the source could not be read, so an option that seems missing may well be there."""

    def place(self, node: yaml.Node) -> Where:
        start, end = node.start_mark, node.end_mark
        if start.line >= len(self.source.lines):
            return Where(self.source, len(self.source.lines) - 1)
        stop = end.column if end.line == start.line else len(self.source.lines[start.line])
        return Where(self.source, start.line, start.column, stop)

    def refuse(self, at: yaml.Node | Where, *, pt: str, en: str, hint: str = "", also: Where | None = None) -> None:
        where = at if isinstance(at, Where) else self.place(at)
        self.problems.append(Problem.at(where, pt=pt, en=en, hint=hint, also=also))

    def add(self, entry: Entry) -> None:
        first = self.entries.setdefault(entry.option.key, entry)
        if first is not entry:
            self.repeated(entry.written, entry.key_where, first.written, first.key_where)

    def repeated(self, written: str, at: yaml.Node | Where, first: str, first_where: Where) -> None:
        hint = t(pt="deixe só uma das duas", en="keep only one of the two")
        if written == first:
            pt, en = f"`{written}` aparece duas vezes", f"`{written}` appears twice"
        else:
            short = written.rsplit(".", 1)[-1], first.rsplit(".", 1)[-1]
            one, other = short if short[0] != short[1] else (written, first)
            pt, en = f"`{one}` repete `{other}`: são a mesma opção", f"`{one}` repeats `{other}`: they are the same option"
        self.refuse(at, pt=pt, en=en, hint=hint, also=first_where)

    def unknown(self, at: yaml.Node | Where, written: str, section: str | None) -> None:
        hint = names.suggest(written, section)
        if self.source.is_file and "." in written and section is None:
            hint = t(
                pt="no arquivo, escreva a seção numa linha e a chave abaixo, com recuo",
                en="in a file, write the section on one line and the key below it, indented",
            )
        self.refuse(at, pt=f"chave desconhecida `{written}`", en=f"unknown key `{written}`", hint=hint)


def pairs(node: yaml.Node, sheet: Sheet) -> Iterator[tuple[yaml.ScalarNode, yaml.Node, bool]]:
    """(key, value, came through `<<`), a merged key only where the mapping itself does not set it."""
    own: dict[str, yaml.ScalarNode] = {}
    merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag == _MERGE:
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                for k, v, _ in pairs(mapping, sheet):
                    merged.setdefault(k.value, (k, v))
        elif not isinstance(key, yaml.ScalarNode):
            sheet.refuse(key, pt="uma chave precisa ser um nome", en="a key must be a name")
        elif key.value in own:
            sheet.repeated(key.value, key, key.value, sheet.place(own[key.value]))
        else:
            own[key.value] = key
            yield key, value, False
    yield from ((k, v, True) for name, (k, v) in merged.items() if name not in own)


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS
