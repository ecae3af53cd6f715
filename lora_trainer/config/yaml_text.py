"""A file's bytes to a tree of YAML nodes, and what to tell a person when YAML refuses them.

Nodes (`yaml.compose`) rather than values, because a node still knows the text as written and its place: YAML 1.1 turns
0123 into 83, 16:9 into 969 and `no` into False, and after that nobody can tell what the user meant.
Left out: repairing broken YAML. It is shown, with the way to write it.
"""

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, t
from .report import Both, Problem, Source, Where, filled

MAX_BYTES = 1_000_000

def decode(data: bytes, path: Path) -> tuple[str, str]:
    """(text, notice). UTF-8 and UTF-16 with or without BOM, else Windows-1252, which is then said."""
    if b"\0" in data[:4096] and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError.said(
            pt=f"`{path}` não é um arquivo de texto",
            en=f"`{path}` is not a text file",
            hint_pt="--config espera um arquivo YAML; o modelo base vai dentro dele, em `modelo.modelo_base`",
            hint_en="--config wants a YAML file; the base model goes inside it, in `model.base_model`",
        )
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return data.decode(encoding), ""
    except UnicodeDecodeError:
        text = data.decode("cp1252", errors="replace")
    notice = t(
        pt=f"{path.name} não está em UTF-8; foi lido como Windows-1252. Salve-o em UTF-8 se algum acento saiu errado.",
        en=f"{path.name} is not UTF-8; it was read as Windows-1252. Save it as UTF-8 if an accent came out wrong.",
    )
    return text, notice


def compose(text: str, source: Source) -> tuple[yaml.Node | None, Problem | None]:
    """The root node (None: empty), or the one thing YAML objects to: its parser cannot go on after an error."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), None
    except yaml.MarkedYAMLError as error:
        return None, _explain(error, source)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = Where(source, before.count("\n"), len(before) - before.rfind("\n") - 1)
        code = error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "\0")
        return None, Problem.at(
            where,
            pt=f"caractere que o YAML não aceita (U+{code:04X})",
            en=f"character YAML does not accept (U+{code:04X})",
            hint=t(pt="apague esse caractere", en="delete that character"),
        )


class _Case:
    """What YAML complained about, and the places it may be about."""

    def __init__(self, error: yaml.MarkedYAMLError, source: Source) -> None:
        self.source, self.problem, self.context = source, error.problem or "", error.context or ""
        mark = error.problem_mark or error.context_mark
        line, self.column = (mark.line, mark.column) if mark else (0, 0)
        self.line = min(line, max(0, len(source.lines) - 1))
        self.text = self.line_text(self.line)
        begun = error.context_mark
        self.begun = Where(source, begun.line, begun.column) if begun else None
        """Where what YAML was reading began."""
        self.key = self._content(self.begun.line if self.begun else self.line)
        match = re.match(r"\s*(?:-\s+)*(?:[^\s\"'#:\[{][^\"'#:]*:\s+|-\s+)?", self.text)
        start = match.end() if match else 0
        self.value = self.text[start:].rstrip()
        """Of a `key: value` or `- value` line."""
        self.value_place = Where(source, self.line, start, len(self.text.rstrip()))

    def line_text(self, line: int) -> str:
        return self.source.lines[line] if line < len(self.source.lines) else ""

    def at(self, start: int, end: int = 0) -> Where:
        return Where(self.source, self.line, start, end)

    def mark(self) -> Where:
        return self.at(self.column)

    def indentation(self) -> Where:
        return self.at(len(self.text) - len(self.text.lstrip()))

    def _content(self, line: int) -> Where:
        text = self.line_text(line) or self.text
        return Where(self.source, line, len(text) - len(text.lstrip()), len(text.rstrip()))

    @property
    def flow(self) -> str:
        """The line on which a list or mapping in brackets began."""
        inside = self.begun and re.search(r"flow (sequence|mapping)", self.context)
        return self.line_text(self.begun.line) + " " if self.begun and inside else ""

    def reference(self) -> Where:
        assert self.begun
        column = self.flow.index("${")
        return Where(self.source, self.begun.line, column, self.flow.find("}", column) + 1)

    def told(self) -> dict[str, Any]:
        """What may stand in the texts."""
        quoted = "'" + self.value.replace("'", "''") + "'"
        bracket = (self.flow[self.begun.start : self.begun.start + 1] if self.begun else "").strip() or "["
        detail = f"{self.context}; {self.problem}".strip("; ")
        return {
            "line": self.line + 1, "opening": self.value[:1], "bracket": bracket, "quoted": quoted,
            "problem": self.problem, "detail": detail,
        }  # fmt: skip


def _misread(case: _Case) -> bool:
    """The value starts with something that has a meaning of its own."""
    opening, value = case.value[:1], case.value
    closes = {"[": "]", "{": "}"}.get(opening)
    if closes:
        return closes in value and not value.endswith(closes)
    return opening != "" and opening in "*&!%@`|>" and (len(value) > 1 or opening not in "|>")


SINGLE_QUOTES = (
    "use aspas simples ou /: 'C:\\pasta\\arquivo' ou C:/pasta/arquivo",
    "use single quotes or /: 'C:\\folder\\file' or C:/folder/file",
)
"""What to do where double quotes made something else of a backslash."""
_QUOTE_IT = ("ponha o valor entre aspas simples: {quoted}", "put the value in single quotes: {quoted}")


@dataclass(frozen=True)
class _Fault:
    holds: Callable[[_Case], Any]
    where: Callable[[_Case], Where | None]
    problem: Both
    hint: Both = ("", "")


_FAULTS = (
    _Fault(
        lambda c: "scanning a quoted scalar" in c.context and "end of stream" in c.problem and c.begun, lambda c: c.begun,
        ("aspas abertas e não fechadas", "quote opened and never closed"),
        ("feche com a mesma aspa", "close it with the same quote")),
    _Fault(
        lambda c: "\t" in c.text[: c.indentation().start] or "'\\t'" in c.problem,
        lambda c: c.at(max(0, c.text.find("\t")), c.text.find("\t") + 1),
        ("tabulação (TAB) na linha {line}", "tab character on line {line}"),
        ("troque TAB por espaços: o YAML só aceita espaços no recuo",
         "replace TAB with spaces: YAML only takes spaces for indentation")),
    _Fault(
        lambda c: "escape" in c.problem, lambda c: c.at(max(0, c.column - 1), c.column + 1),
        ("barra invertida dentro de aspas duplas", "backslash inside double quotes"), SINGLE_QUOTES),
    _Fault(
        _misread, lambda c: c.value_place,
        ("o valor começa com `{opening}`, que tem outro sentido em YAML",
         "the value starts with `{opening}`, which means something else in YAML"),
        _QUOTE_IT),
    _Fault(
        lambda c: "mapping values" in c.problem and re.search(r":(\s|$)", c.value), lambda c: c.value_place,
        ("há um segundo `: ` no valor", "there is a second `: ` in the value"), _QUOTE_IT),
    _Fault(
        lambda c: "could not find expected ':'" in c.problem, lambda c: c.key,
        ("falta `: ` (dois-pontos e espaço) depois da chave", "`: ` (colon and space) is missing after the key"),
        ("escreva `chave: valor`", "write `key: value`")),
    _Fault(  # the `{` of a reference opens a mapping of its own there
        lambda c: "${" in c.flow, _Case.reference,
        ("`${{…}}` dentro de `{bracket}`", "`${{…}}` inside `{bracket}`"),
        ("ponha a referência entre aspas: '${{secao.chave}}'", "quote the reference: '${{section.key}}'")),
    _Fault(
        lambda c: c.flow, lambda c: c.begun,
        ("`{bracket}` aberto e não fechado, ou fechado no lugar errado",
         "`{bracket}` opened and not closed, or closed in the wrong place"),
        ("feche a lista, ou ponha o valor entre aspas simples", "close the list, or put the value in single quotes")),
    _Fault(
        lambda c: c.value[:1] in ("'", '"') and "<scalar>" in c.problem, _Case.mark,
        ("há texto depois das aspas fechadas", "there is text after the closing quote"), _QUOTE_IT),
    _Fault(
        lambda c: "expected a single document" in c.context + c.problem, _Case.mark,
        ("há mais de um documento no arquivo", "the file holds more than one document"),
        ("apague a linha `---` e o que não for desta configuração",
         "delete the `---` line and what is not of this config")),
    _Fault(
        lambda c: "anchor" in c.problem or "alias" in c.problem, _Case.mark,
        ("âncora YAML inválida ({problem})", "invalid YAML anchor ({problem})")),
    _Fault(
        lambda c: "expected <block end>" in c.problem or "mapping values are not allowed" in c.problem, _Case.indentation,
        ("recuo que não combina com o das linhas vizinhas", "indentation that does not match its neighbours"),
        ("chaves da mesma seção começam na mesma coluna, com espaços",
         "keys of one section start at the same column, with spaces")),
    _Fault(lambda c: True, _Case.mark, ("YAML inválido ({detail})", "invalid YAML ({detail})")),
)  # fmt: skip
"""The first that holds is told."""


def _explain(error: yaml.MarkedYAMLError, source: Source) -> Problem:
    case = _Case(error, source)
    fault = next(fault for fault in _FAULTS if fault.holds(case))
    told = case.told()
    return Problem(filled(fault.problem, told), fault.where(case), filled(fault.hint, told))
