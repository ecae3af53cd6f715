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


def pairs(node: yaml.MappingNode, sheet: Sheet) -> Iterator[tuple[yaml.ScalarNode, yaml.Node, bool]]:
    """(key, value, came through `<<`), a merged key only where the mapping itself does not set it."""
    own: dict[str, yaml.ScalarNode] = {}
    merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                for k, v, _ in pairs(mapping, sheet) if isinstance(mapping, yaml.MappingNode) else ():
                    merged.setdefault(k.value, (k, v))
        elif not isinstance(key, yaml.ScalarNode):
            complain(sheet, where_of(key, sheet), t(pt="uma chave precisa ser um nome", en="a key must be a name"), "")
        elif key.value in own:
            duplicate(sheet, key.value, where_of(key, sheet), key.value, where_of(own[key.value], sheet))
        else:
            own[key.value] = key
            yield key, value, False
    yield from ((k, v, True) for name, (k, v) in merged.items() if name not in own)


def add(sheet: Sheet, entry: Entry) -> None:
    first = sheet.entries.get(entry.option.key)
    if first is not None:
        duplicate(sheet, entry.written, entry.key_where, first.written, first.key_where)
    else:
        sheet.entries[entry.option.key] = entry


def duplicate(sheet: Sheet, written: str, where: Where, first: str, first_where: Where) -> None:
    last, first_last = written.rsplit(".", 1)[-1], first.rsplit(".", 1)[-1]
    if written == first:
        message = t(pt=f"`{written}` aparece duas vezes", en=f"`{written}` appears twice")
    else:
        shown = (last, first_last) if last != first_last else (written, first)
        message = t(
            pt=f"`{shown[0]}` repete `{shown[1]}`: são a mesma opção",
            en=f"`{shown[0]}` repeats `{shown[1]}`: they are the same option",
        )
    complain(sheet, where, message, t(pt="deixe só uma das duas", en="keep only one of the two"), first_where)


def unknown(sheet: Sheet, where: Where, written: str, section: str | None) -> None:
    what = t(pt="chave desconhecida", en="unknown key")
    if sheet.source.is_file and "." in written and section is None:
        hint = t(
            pt="no arquivo, escreva a seção numa linha e a chave abaixo, com recuo",
            en="in a file, write the section on one line and the key below it, indented",
        )
    else:
        hint = names.suggest(written, section)
    complain(sheet, where, f"{what} `{written}`", hint)


def complain(sheet: Sheet, where: Where, message: str, hint: str, also: Where | None = None) -> None:
    sheet.problems.append(Problem(message, where, hint, also))


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in NULLS


def where_of(node: yaml.Node, sheet: Sheet) -> Where:
    start, end = node.start_mark, node.end_mark
    if start.line >= len(sheet.source.lines):
        return Where(sheet.source, len(sheet.source.lines) - 1)
    stop = end.column if end.line == start.line else len(sheet.source.lines[start.line])
    return Where(sheet.source, start.line, start.column, stop)
