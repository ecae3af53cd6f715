"""Rows to conversations and texts: which schema a row follows is recognised from its columns, row by row.

Column names count in any case and in Portuguese too; other columns are ignored. The rules, all told in the report:
several turns of one role in a row are joined by a blank line; an empty system prompt is left out; numbers are written
out as text; a conversation that ends with the user, has an empty turn or an unknown role is dropped, with its line.
Not read: images in messages, tool calls.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..config import names
from ..config.schema import DataConfig
from ..data.json_rows import CHAT, Row
from ..data.notes import Notes, naming
from ..data.tables import SAID_BY, parsed_cell
from ..errors import DataError, t
from .read import Rows, raise_bad

INSTRUCTION = ("instruction", "instrucao", "instrução", "instruccion")
INPUT = ("input", "context", "entrada", "contexto")
PROMPT = ("prompt", "question", "query", "pergunta", "input", "entrada")
ANSWER = ("completion", "output", "response", "answer", "resposta", "saida", "saída")
TEXT = ("text", "texto", "content", "conteudo", "conteúdo")
SYSTEM = ("system", "system_prompt", "sistema")
NOTHING_USABLE = {"pt": "nenhum exemplo pode ser usado", "en": "no example can be used"}

ROLES = {
    "user": "user human usuario usuário prompter",
    "assistant": "assistant gpt model bot chatgpt assistente ai chatbot function_call",
    "system": "system sistema developer",
    "tool": "tool function observation ipython function_response ferramenta",
}
"""Role -> what other data sets call it."""
_ROLE_OF = {alias: role for role, aliases in ROLES.items() for alias in aliases.split()}


class Turn(NamedTuple):
    role: str
    """user, assistant, system or tool."""
    text: str


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    where: str

    @property
    def content(self) -> str:
        """Equal for equal conversations, whatever the file, the template and the tokenizer."""
        return _hash("chat", *(part for turn in self.turns for part in turn))


@dataclass(frozen=True)
class Text:
    text: str
    where: str

    @property
    def content(self) -> str:
        return _hash("text", self.text)


TextExample = Conversation | Text


@dataclass
class Collected:
    examples: list[TextExample] = field(default_factory=list)
    schemas: Counter[str] = field(default_factory=Counter)
    """Schema -> usable rows."""
    rows: int = 0
    """All rows read, usable or not."""
    files: list[str] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    """`notes.excluded`: reason -> where, of the rows that were dropped."""

    @property
    def dropped(self) -> int:
        return sum(map(len, self.notes.excluded.values()))


class Unusable(Exception):
    """This row cannot be trained on, and the others can; its text is the reason, for people."""


def collect(rows: Rows, config: DataConfig) -> Collected:
    """Convert every row. Raises DataError, all at once, for lines that are no rows or have no known columns, unless
    `bad_rows` says to skip them, and when nothing is left."""
    out = Collected(rows=len(rows.rows) + len(rows.bad), files=rows.files, notes=rows.notes)
    bad, joined = list(rows.bad), list[str]()
    for row in rows.rows:
        fields = {name: parsed_cell(value, chat=name in (*CHAT, "history")) for name, value in _lower_case(row)}
        schema = recognise(fields)
        if schema is None or config.text_format not in ("auto", schema):
            bad.append(f"{row.where}: {_unrecognised(row, config.text_format)}")
            continue
        try:
            out.examples.append(convert(fields, schema, row.where, joined))
        except Unusable as reason:
            out.notes.exclude(str(reason), row.where)
        else:
            out.schemas[schema] += 1
    if config.bad_rows == "stop":
        raise_bad(bad)
    elif bad:
        out.notes.excluded[t(pt="linhas ruins", en="bad lines")] = bad
    if joined:
        count = len(joined)
        out.notes.note(
            pt=f"turnos seguidos do mesmo papel, juntados: {count} ({naming(joined)})",
            en=f"turns of one role in a row, joined: {count} ({naming(joined)})",
        )
    if not out.examples:
        raise _nothing_usable(out.notes)
    return out


def _lower_case(row: Row) -> Iterator[tuple[str, Any]]:
    return ((key.strip().lower(), value) for key, value in row.fields.items())


def recognise(fields: dict[str, Any]) -> str | None:
    """The schema of a row, from its lower-case columns; the more specific first."""
    turns = _first(fields, CHAT)
    if isinstance(turns, list):
        first = turns[0] if turns and isinstance(turns[0], dict) else {}
        return "sharegpt" if "from" in first else "messages"
    if _has(fields, INSTRUCTION) and _has(fields, ANSWER):
        return "alpaca"
    if _has(fields, PROMPT) and _has(fields, ANSWER):
        return "prompt_completion"
    if "role" in fields or "from" in fields:  # a lone message, not a text
        return None
    return "text" if _has(fields, TEXT) else None


def convert(fields: dict[str, Any], schema: str, where: str, joined: list[str]) -> TextExample:
    """One row as an example; its place goes to `joined` if turns were joined. Raises Unusable."""
    if schema == "text":
        text = _written(_first(fields, TEXT), "text")
        if not text.strip():
            raise Unusable(t(pt="texto vazio", en="empty text"))
        return Text(text, where)
    turns = _turns(fields, schema)
    tidied = tidy(turns)
    if len(tidied) < len([turn for turn in turns if turn.text.strip()]):
        joined.append(where)
    return Conversation(tuple(tidied), where)


def _turns(fields: dict[str, Any], schema: str) -> list[Turn]:
    system = _first(fields, SYSTEM)
    turns = [Turn("system", _written(system, "system"))] if system not in (None, "") else []
    if schema in ("messages", "sharegpt"):
        return turns + [_message(item) for item in _first(fields, CHAT)]
    if schema == "alpaca":
        for pair in fields.get("history") or []:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise Unusable(t(pt="history não é uma lista de pares", en="history is no list of pairs"))
            turns += [Turn("user", _written(pair[0], "history")), Turn("assistant", _written(pair[1], "history"))]
        parts = (_written(_first(fields, INSTRUCTION), "instruction"), _written(_first(fields, INPUT), "input"))
        prompt: Any = "\n\n".join(part for part in parts if part.strip())
    else:
        prompt = _first(fields, PROMPT)
    answer = _first(fields, ANSWER)
    return turns + _either(prompt, "user", "prompt") + _either(answer, "assistant", "completion")


def _either(value: Any, role: str, name: str) -> list[Turn]:
    """A prompt or completion is a text, or a list of messages."""
    if isinstance(value, list):
        return [_message(item) for item in value]
    return [Turn(role, _written(value, name))]


def _message(item: Any) -> Turn:
    if not isinstance(item, dict):
        raise Unusable(t(pt="um turno não é um objeto {…}", en="a turn is no object {…}"))
    said = next((item[key] for key in SAID_BY if key in item), None)
    role = _ROLE_OF.get(str(said).strip().lower())
    if role is None:
        raise Unusable(_unknown_role(said))
    if item.get("tool_calls"):
        raise Unusable(t(pt="tool_calls não é lido", en="tool_calls is not read"))
    value = next((item[key] for key in ("content", "value", "text", "message", "texto") if key in item), None)
    if isinstance(value, list):  # OpenAI's parts
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in value):
            raise Unusable(t(pt="mensagem com algo além de texto", en="a message with more than text"))
        value = "".join(part["text"] for part in value)
    return Turn(role, _written(value, str(said)))


def tidy(turns: Sequence[Turn]) -> list[Turn]:
    """Turns that can be trained on: joined, non-empty, ending with an answer to something."""
    out: list[Turn] = []
    for turn in turns:
        if not turn.text.strip():
            if turn.role == "system":
                continue
            raise Unusable(
                t(pt=f"turno vazio ({turn.role}, o {len(out) + 1}º)", en=f"empty turn ({turn.role}, no. {len(out) + 1})")
            )
        if out and out[-1].role == turn.role and turn.role != "tool":
            out[-1] = Turn(turn.role, f"{out[-1].text}\n\n{turn.text}")
        else:
            out.append(turn)
    if not out:
        raise Unusable(t(pt="conversa sem turnos", en="a conversation without turns"))
    if out[-1].role != "assistant":
        raise Unusable(t(pt="termina sem resposta do assistente", en="ends without an answer of the assistant"))
    if all(turn.role in ("assistant", "system") for turn in out):
        raise Unusable(t(pt="resposta sem pergunta", en="an answer to nothing"))
    return out


def _written(value: Any, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        return str(value)
    raise Unusable(t(pt=f"{name} não é um texto", en=f"{name} is no text"))


def _first(fields: dict[str, Any], columns: Sequence[str]) -> Any:
    return next((fields[column] for column in columns if column in fields), None)


def _has(fields: dict[str, Any], columns: Sequence[str]) -> bool:
    return any(column in fields for column in columns)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode("utf-8")).hexdigest()


def _unknown_role(said: Any) -> str:
    if said is None:
        return t(pt="turno sem papel (role ou from)", en="a turn without a role (role or from)")
    near = names.nearest(str(said), list(_ROLE_OF), 0.6)
    hint = t(pt=f"; quis dizer `{near}`?", en=f"; did you mean `{near}`?") if near else ""
    return t(pt=f"papel desconhecido `{said}`{hint}", en=f"unknown role `{said}`{hint}")


def _unrecognised(row: Row, wanted: str) -> str:
    columns = ", ".join(list(row.fields)[:8]) or t(pt="nenhuma", en="none")
    if wanted != "auto":
        return t(
            pt=f"não está no formato {wanted} (dados.formato_texto); colunas: {columns}",
            en=f"is not in the {wanted} format (data.text_format); columns: {columns}",
        )
    return t(
        pt=f"colunas desconhecidas ({columns}); espero messages, conversations, instruction + output, "
        "prompt + completion ou text",
        en=f"unknown columns ({columns}); expected are messages, conversations, instruction + output, "
        "prompt + completion or text",
    )


def _nothing_usable(notes: Notes) -> DataError:
    if not notes.excluded:
        return DataError.said(pt="os arquivos não têm nenhuma linha de dados", en="the files hold no row of data")
    return notes.nothing_left(**NOTHING_USABLE)
