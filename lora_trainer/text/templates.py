"""The chat template: the tokenizer's own, one of ours by name, or none.

Rendering is deterministic: a template that asks for today's date gets a fixed one, so that a run resumed tomorrow sees
the same tokens. A template that refuses system prompts, or quietly leaves them out, gets them folded into the first
user turn. Conversations need a template (case C03); rows of one question and one answer can do with a plain layout.
"""

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import jinja2

from ..config.names import nearest, shown
from ..errors import ConfigError, DataError, language, t
from .schemas import Turn

FOLDER = Path(__file__).parent / "chat_templates"
_DATE = date(2024, 7, 26)
"""What Llama 3's template itself falls back on."""
_TODAY = re.compile(r"""strftime_now\s*\(\s*(['"])(.*?)\1\s*\)""")
_MARKER = re.compile(r"<\|?[a-z_]+\|?>|\[/?INST\]")
_PROBE = "⟦probe⟧"


class Refused(Exception):
    """The template does not take this conversation; its text is the template's own message."""


@dataclass(frozen=True)
class ChatTemplate:
    name: str
    """"tokenizer", or the name of one of ours."""
    source: str
    """Jinja; belongs into the saved tokenizer, so that inference renders as training did."""
    tokenizer: Any
    takes_system: bool = True
    notes: list[str] = field(default_factory=list)

    def render(self, turns: Sequence[Turn], *, prompt: bool = False) -> str:
        """The turns as one text; with `prompt`, up to where the assistant is to answer. Raises Refused."""
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                chat_template=_timeless(self.source),
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Refused(str(error)) from error
        return text

    def fitted(self, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns as this template takes them."""
        if self.takes_system or turns[0].role != "system":
            return tuple(turns)
        place = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
        if place is None:
            return tuple(turns)
        folded = Turn("user", f"{turns[0].text}\n\n{turns[place].text}")
        return (*turns[1:place], folded, *turns[place + 1 :])

    def install(self, tokenizer: Any) -> None:
        """Before the tokenizer is saved beside the adapter."""
        tokenizer.chat_template = self.source


@functools.cache
def _timeless(source: str) -> str:
    """The template with a fixed date wherever it asks for today's."""
    return _TODAY.sub(lambda call: repr(_DATE.strftime(call[2])), source)


def available() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def listed() -> str:
    """The names for people, in their language."""
    words = {"plain": "simples", "none": "nenhum"} if language() == "pt" else {}
    return ", ".join(words.get(name, name) for name in available())


def choose(tokenizer: Any, wanted: str, schemas: Collection[str]) -> ChatTemplate:
    """The template for `data.chat_template` = `wanted`, or under "auto" for data of these schemas."""
    own = own_template(tokenizer)
    if wanted == "auto" and own is not None:
        return _probed(ChatTemplate("tokenizer", own, tokenizer))
    if wanted == "auto":
        if {"messages", "sharegpt"} & set(schemas):
            raise _no_template()
        wanted = "alpaca" if "alpaca" in schemas else "none"
    if wanted not in available():
        raise _unknown(wanted)
    source = (FOLDER / f"{wanted}.jinja").read_text(encoding="utf-8").rstrip("\n")
    if adds_bos(tokenizer) and "bos_token" not in source:
        source = "{{ bos_token }}" + source
    template = _probed(ChatTemplate(wanted, source, tokenizer))
    split = _split_markers(source, tokenizer)
    if split:
        template.notes.append(
            t(
                pt=f"o formato {wanted} usa {', '.join(split)}, que este tokenizador não tem como um token só; "
                "o formato simples gasta menos",
                en=f"the {wanted} template uses {', '.join(split)}, which this tokenizer does not have as one token; "
                "the plain one costs less",
            )
        )
    return template


def own_template(tokenizer: Any) -> str | None:
    """The tokenizer's template; the default one where it has several."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default") or next(iter(found.values()), None)
    return found if isinstance(found, str) and found.strip() else None


def adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _probed(template: ChatTemplate) -> ChatTemplate:
    """Try it on a question and an answer, then with a system prompt before them."""
    chat = (Turn("user", "a"), Turn("assistant", _PROBE))
    try:
        rendered = template.render(chat)
    except Refused as refusal:
        raise _broken(template, str(refusal)) from refusal
    if _PROBE not in rendered:
        raise _broken(template, t(pt="ele não escreve a resposta do assistente", en="it leaves out the answer"))
    try:
        takes_system = _PROBE in template.render((Turn("system", _PROBE), Turn("user", "a"), Turn("assistant", "b")))
    except Refused:
        takes_system = False
    return ChatTemplate(template.name, template.source, template.tokenizer, takes_system, template.notes)


def _split_markers(source: str, tokenizer: Any) -> list[str]:
    markers = dict.fromkeys(_MARKER.findall(source))
    return [m for m in markers if len(tokenizer(m, add_special_tokens=False).input_ids) > 1 and not m.startswith("[")]


def _no_template() -> DataError:
    return DataError.said(
        pt="os dados são conversas, e o tokenizador do modelo base não tem formato de conversa (chat template)",
        en="the data are conversations, and the base's tokenizer has no chat template",
        hint_pt=f"escolha um em dados.formato_conversa: {listed()}; para um modelo base, simples serve",
        hint_en=f"choose one in data.chat_template: {listed()}; for a base model, plain will do",
        where=shown("data", "chat_template"),
    )


def _unknown(wanted: str) -> ConfigError:
    near = nearest(wanted, available())
    meant = t(pt=f"quis dizer `{near}`? ", en=f"did you mean `{near}`? ") if near else ""
    names = f"auto, {listed()}"
    return ConfigError(
        t(pt=f"não há formato de conversa `{wanted}`", en=f"there is no chat template `{wanted}`"),
        hint=meant + t(pt=f"há: {names}", en=f"there are: {names}"),
        where=shown("data", "chat_template"),
    )


def _broken(template: ChatTemplate, why: str) -> DataError:
    return DataError.said(
        pt=f"o formato de conversa `{template.name}` não funciona: {why}",
        en=f"the chat template `{template.name}` does not work: {why}",
        hint_pt=f"escolha outro em dados.formato_conversa: {listed()}",
        hint_en=f"choose another in data.chat_template: {listed()}",
        where=shown("data", "chat_template"),
    )
