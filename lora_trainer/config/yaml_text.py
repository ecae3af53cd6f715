"""A file's bytes to a tree of YAML nodes, and what to tell a person when YAML refuses them.

Nodes (`yaml.compose`) rather than values, because a node still knows the text as written and its place: YAML 1.1 turns
0123 into 83, 16:9 into 969 and `no` into False, and after that nobody can tell what the user meant.
Left out: repairing broken YAML. It is shown, with the way to write it.
"""

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import ConfigError, t
from .report import Problem, Source, Where

MAX_BYTES = 1_000_000

QUOTE_IT = ("ponha o valor entre aspas simples: {}", "put the value in single quotes: {}")


def decode(data: bytes, path: Path) -> tuple[str, str]:
    """(text, notice). UTF-8 and UTF-16 with or without BOM, else Windows-1252, which is then said."""
    if b"\0" in data[:4096] and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            t(pt=f"`{path}` não é um arquivo de texto", en=f"`{path}` is not a text file"),
            t(
                pt="--config espera um arquivo YAML; o modelo base vai dentro dele, em `modelo.modelo_base`",
                en="--config wants a YAML file; the base model goes inside it, in `model.base_model`",
            ),
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
        message = t(
            pt=f"caractere que o YAML não aceita (U+{code:04X})", en=f"character YAML does not accept (U+{code:04X})"
        )
        return None, Problem(message, where, t(pt="apague esse caractere", en="delete that character"))


@dataclass(frozen=True)
class _Case:
    """What YAML complained about, and the line it stood on."""

    source: Source
    line: int
    text: str
    problem: str
    error: yaml.MarkedYAMLError


def _explain(error: yaml.MarkedYAMLError, source: Source) -> Problem:
    problem, context = error.problem or "", error.context or ""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    if "scanning a quoted scalar" in context and "end of stream" in problem and error.context_mark:
        where = Where(source, error.context_mark.line, error.context_mark.column)
        return Problem(
            t(pt="aspas abertas e não fechadas", en="quote opened and never closed"),
            where,
            t(pt="feche com a mesma aspa", en="close it with the same quote"),
        )
    line = min(line, max(0, len(source.lines) - 1))
    text = source.lines[line] if source.lines else ""
    case = _Case(source, line, text, problem, error)
    for test in (_tab, _escape, _needs_quotes, _two_colons, _missing_space, _bracket, _after_quote):
        if found := test(case):
            return found
    where = Where(source, line, column)
    if "expected a single document" in context + problem:
        message = t(pt="há mais de um documento no arquivo", en="the file holds more than one document")
        return Problem(
            message,
            where,
            t(
                pt="apague a linha `---` e o que não for desta configuração",
                en="delete the `---` line and what is not of this config",
            ),
        )
    if "anchor" in problem or "alias" in problem:
        message = t(pt=f"âncora YAML inválida ({problem})", en=f"invalid YAML anchor ({problem})")
        return Problem(message, where)
    if "expected <block end>" in problem or "mapping values are not allowed" in problem:
        return Problem(
            t(
                pt="recuo que não combina com o das linhas vizinhas",
                en="indentation that does not match its neighbours",
            ),
            Where(source, line, len(text) - len(text.lstrip())),
            t(
                pt="chaves da mesma seção começam na mesma coluna, com espaços",
                en="keys of one section start at the same column, with spaces",
            ),
        )
    detail = f"{context}; {problem}".strip("; ")
    return Problem(t(pt=f"YAML inválido ({detail})", en=f"invalid YAML ({detail})"), where)


def _value_start(text: str) -> int:
    """Column where the value of a `key: value` or `- value` line begins."""
    match = re.match(r"\s*(?:-\s+)*(?:[^\s\"'#:\[{][^\"'#:]*:\s+|-\s+)?", text)
    return match.end() if match else 0


def _quoted(text: str, start: int) -> str:
    value = text[start:].rstrip()
    return "'" + value.replace("'", "''") + "'"


def _tab(case: _Case) -> Problem | None:
    indent = case.text[: len(case.text) - len(case.text.lstrip())]
    if "\t" not in indent and "'\\t'" not in case.problem:
        return None
    column = max(0, case.text.find("\t"))
    message = t(pt=f"tabulação (TAB) na linha {case.line + 1}", en=f"tab character on line {case.line + 1}")
    hint = t(
        pt="troque TAB por espaços: o YAML só aceita espaços no recuo",
        en="replace TAB with spaces: YAML only takes spaces for indentation",
    )
    return Problem(message, Where(case.source, case.line, column, column + 1), hint)


def _escape(case: _Case) -> Problem | None:
    if "escape" not in case.problem:
        return None
    column = case.error.problem_mark.column if case.error.problem_mark else 0
    return Problem(
        t(pt="barra invertida dentro de aspas duplas", en="backslash inside double quotes"),
        Where(case.source, case.line, max(0, column - 1), column + 1),
        t(
            pt="use aspas simples ou /: 'C:\\pasta\\arquivo' ou C:/pasta/arquivo",
            en="use single quotes or /: 'C:\\folder\\file' or C:/folder/file",
        ),
    )


def _needs_quotes(case: _Case) -> Problem | None:
    start = _value_start(case.text)
    value = case.text[start:].rstrip()
    opening = value[:1]
    closes = {"[": "]", "{": "}"}.get(opening, "")
    after_bracket = bool(closes) and closes in value and not value.endswith(closes)
    if not (after_bracket or (opening and opening in "*&!%@`|>" and (len(value) > 1 or opening not in "|>"))):
        return None
    message = t(
        pt=f"o valor começa com `{opening}`, que tem outro sentido em YAML",
        en=f"the value starts with `{opening}`, which means something else in YAML",
    )
    hint = t(pt=QUOTE_IT[0], en=QUOTE_IT[1]).format(_quoted(case.text, start))
    return Problem(message, Where(case.source, case.line, start, len(case.text.rstrip())), hint)


def _two_colons(case: _Case) -> Problem | None:
    start = _value_start(case.text)
    if "mapping values" not in case.problem or not re.search(r":(\s|$)", case.text[start:]):
        return None
    return Problem(
        t(pt="há um segundo `: ` no valor", en="there is a second `: ` in the value"),
        Where(case.source, case.line, start, len(case.text.rstrip())),
        t(pt=QUOTE_IT[0], en=QUOTE_IT[1]).format(_quoted(case.text, start)),
    )


def _missing_space(case: _Case) -> Problem | None:
    if "could not find expected ':'" not in case.problem:
        return None
    mark = case.error.context_mark or case.error.problem_mark
    line = mark.line if mark else case.line
    text = case.source.lines[line] if line < len(case.source.lines) else case.text
    return Problem(
        t(pt="falta `: ` (dois-pontos e espaço) depois da chave", en="`: ` (colon and space) is missing after the key"),
        Where(case.source, line, len(text) - len(text.lstrip()), len(text.rstrip())),
        t(pt="escreva `chave: valor`", en="write `key: value`"),
    )


def _after_quote(case: _Case) -> Problem | None:
    start = _value_start(case.text)
    if case.text[start : start + 1] not in ("'", '"') or "<scalar>" not in case.problem:
        return None
    return Problem(
        t(pt="há texto depois das aspas fechadas", en="there is text after the closing quote"),
        Where(case.source, case.line, case.error.problem_mark.column if case.error.problem_mark else start),
        t(pt=QUOTE_IT[0], en=QUOTE_IT[1]).format(_quoted(case.text, start)),
    )


def _bracket(case: _Case) -> Problem | None:
    mark = case.error.context_mark
    if mark is None or not re.search(r"flow (sequence|mapping)", case.error.context or ""):
        return None
    line = case.source.lines[mark.line] if mark.line < len(case.source.lines) else ""
    opening = line[mark.column : mark.column + 1] or "["
    if "${" in line:
        # The `{` of a reference opens a mapping of its own there.
        column = line.index("${")
        message = t(pt=f"`${{…}}` dentro de `{opening}`", en=f"`${{…}}` inside `{opening}`")
        return Problem(
            message,
            Where(case.source, mark.line, column, line.find("}", column) + 1),
            t(pt="ponha a referência entre aspas: '${secao.chave}'", en="quote the reference: '${section.key}'"),
        )
    return Problem(
        t(
            pt=f"`{opening}` aberto e não fechado, ou fechado no lugar errado",
            en=f"`{opening}` opened and not closed, or closed in the wrong place",
        ),
        Where(case.source, mark.line, mark.column),
        t(
            pt="feche a lista, ou ponha o valor entre aspas simples",
            en="close the list, or put the value in single quotes",
        ),
    )
