"""JSON Lines and JSON arrays, told apart by their content, never by the file's name.

Every row keeps the line it starts on, and every fault its line and column. One object of the whole file is a row too,
or, when all it holds of objects is one list (`{"data": […]}`), a wrapper around the rows.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import t

_SPACE = re.compile(r"[ \t\n]*")
_HALF = re.compile("[\ud800-\udfff]")
CHAT = ("messages", "conversations", "conversation", "mensagens", "conversa", "conversas", "dialog", "dialogue")


@dataclass(frozen=True)
class Row:
    """One record of a data file; `where` is "file:line", as people open it in an editor."""

    where: str
    fields: dict[str, Any]


@dataclass
class FileRows:
    """What one file gave, and what is wrong with its lines."""

    name: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    plain: bool = False
    """Rows as they stand: half a Unicode character is no fault, and a lone object no wrapper around others."""

    def empty(self) -> "FileRows":
        return replace(self, rows=[], problems=[])

    def add(self, line: int, value: Any) -> None:
        if not isinstance(value, dict):
            self.fail(
                line, t(pt="esperava um objeto {…}", en="expected an object {…}") + f", {_kind(value)}: {_short(value)}"
            )
            return
        for key, item in value.items():
            if not (self.plain or (whole(key) and whole(item))):
                told = key.encode("ascii", "backslashreplace").decode()
                self.fail(line, t(pt=f"{told}: metade de um caractere Unicode", en=f"{told}: half a Unicode character"))
                return
        self.rows.append(Row(f"{self.name}:{line}", value))

    def fail(self, line: int, what: str, column: int | None = None) -> None:
        place = f"{self.name}:{line}" if column is None else f"{self.name}:{line}:{column}"
        self.problems.append(f"{place}: {what}")

    def fail_at(self, place: int, text: str, what: str) -> None:
        """`place` in the file's `text`."""
        self.fail(_line_of(text, place), what, place - text.rfind("\n", 0, place))


def read_json(text: str, name: str, *, plain: bool = False) -> FileRows:
    out = FileRows(name, plain=plain)
    if text.lstrip().startswith("["):
        _array(text, text.index("["), out)
        return out
    _lines(text, out)
    if out.problems and not out.rows:  # no line stands for itself: one object written over several lines?
        return _whole_file(text, out)
    if len(out.rows) == 1 and not out.problems:
        return _unwrapped(text, out)
    return out


def _lines(text: str, out: FileRows) -> None:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            out.fail(number, _explained(error), error.colno)
        except RecursionError:
            out.fail(number, t(pt="listas dentro de listas demais", en="lists nested too deeply"))
        except ValueError:  # Python reads no integer of more than 4300 digits
            out.fail(number, _endless())
        else:
            out.add(number, value)


def _whole_file(text: str, by_lines: FileRows) -> FileRows:
    out = by_lines.empty()
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if text.lstrip().split("\n", 1)[0].strip() != "{":  # lines that each hold an object, all of them faulty
            return by_lines
        out.fail(error.lineno, _explained(error), error.colno)
        return out
    except (RecursionError, ValueError):
        return by_lines
    out.add(_line_of(text, len(text) - len(text.lstrip())), value)
    return _unwrapped(text, out)


def _unwrapped(text: str, out: FileRows) -> FileRows:
    """The rows of `{"data": [{…}, …]}`; a conversation's own list of turns is no wrapper."""
    fields = out.rows[0].fields if out.rows else {}
    lists = [key for key, value in fields.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if out.plain or len(lists) != 1 or lists[0].strip().lower() in CHAT:
        return out
    found = re.search(re.escape(json.dumps(lists[0], ensure_ascii=False)) + r"\s*:\s*\[", text)
    if found is None:
        return out
    inner = out.empty()
    _array(text, found.end() - 1, inner, alone=False)
    return inner


def _array(text: str, start: int, out: FileRows, alone: bool = True) -> None:
    """The elements of the array that opens at `start`; the first fault ends it, as nothing after it is certain."""
    decoder = json.JSONDecoder()
    place, line, counted = _skip(text, start + 1), 1, 0
    while place < len(text) and text[place] != "]":
        line, counted = line + text.count("\n", counted, place), place
        try:
            value, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            out.fail(error.lineno, _explained(error), error.colno)
            return
        except ValueError:
            out.fail(line, _endless())
            return
        out.add(line, value)
        place = _skip(text, end)
        if text[place : place + 1] == ",":
            comma, place = place, _skip(text, place + 1)
            if text[place : place + 1] == "]":
                out.fail_at(comma, text, _trailing_comma("]"))
                return
        elif text[place : place + 1] != "]":
            out.fail_at(end, text, _between(text[place : place + 1]))
            return
    rest = _skip(text, place + 1)
    if place >= len(text):
        out.fail(_line_of(text, len(text)), _between(""))
    elif alone and rest < len(text):
        out.fail_at(rest, text, t(pt="há texto depois do fim da lista", en="there is text after the end of the list"))


def _between(met: str) -> str:
    if not met:
        return t(pt="a lista não termina: falta `]`", en="the list has no end: no `]`")
    return t(pt="falta vírgula entre dois exemplos", en="a comma is missing between two examples")


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _line_of(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _endless() -> str:
    return t(pt="um número de milhares de algarismos; ponha-o entre aspas", en="a number of thousands of digits; quote it")


def _explained(error: json.JSONDecodeError) -> str:
    """The decoder's complaint in the words of somebody who edits the file."""
    text, place = error.doc, error.pos
    met, before = text[place : place + 1], text[:place].rstrip()[-1:]
    if error.msg == "Extra data":
        if text[:place].rstrip().endswith(("}", "]")) and met in ("{", "["):
            return t(
                pt="mais de um objeto na mesma linha: ponha cada um na sua",
                en="more than one object on the line: give each its own",
            )
        rest = repr(text[place : place + 20])
        return t(pt=f"sobra texto depois do objeto: {rest}", en=f"text after the object: {rest}")
    if "trailing comma" in error.msg or (before == "," and met in ("}", "]")):
        return _trailing_comma(met if met in ("}", "]") else text[place + 1 :].lstrip()[:1])
    if met == "'":
        return t(pt="aspas simples; JSON usa aspas duplas", en="single quotes; JSON uses double quotes")
    if error.msg.startswith("Invalid control character"):
        return t(
            pt="quebra de linha ou TAB no meio de um texto: escreva \\n ou \\t",
            en="a line break or TAB inside a text: write \\n or \\t",
        )
    if error.msg.startswith("Unterminated string"):
        return t(pt="um texto abre aspas e não fecha", en="a text opens its quotes and does not close them")
    return t(pt=f"JSON inválido ({error.msg})", en=f"invalid JSON ({error.msg})")


def _trailing_comma(closing: str) -> str:
    return t(pt=f"vírgula sobrando antes de `{closing}`", en=f"a comma too many before `{closing}`")


def whole(value: Any) -> bool:
    r"""False for a lone surrogate (`\ud83d`), which JSON can spell and no tokenizer can read."""
    if isinstance(value, str):
        return value.isascii() or _HALF.search(value) is None
    if isinstance(value, dict):
        return all(whole(key) and whole(item) for key, item in value.items())
    return all(map(whole, value)) if isinstance(value, list) else True


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return t(pt="veio uma lista", en="got a list")
    return t(pt="veio outra coisa", en="got something else")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 40 else text[:37] + "…"
