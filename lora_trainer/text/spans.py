"""Where the assistant's words lie in a rendered conversation, for any template and without `{% generation %}`.

What the assistant is to learn starts where the prompt for its turn ends: the conversation up to there, rendered with
the generation prompt, is a prefix of the whole one. Where a template is not prefix-stable (it strips the reasoning of
earlier turns, or prompts with more than it writes), the answer is found by rendering once more with another text in
its place: what differs is the answer. How a turn ends is told by what follows the answer (tokens.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import t
from .schemas import Turn
from .templates import ChatTemplate, Refused

_OTHER = "\ue000other\ue001"
"""Private-use characters, which no data have and no template trims."""


class Span(NamedTuple):
    """Character positions in the rendered text."""

    start: int
    end: int
    """Where the answer's own text ends."""
    limit: int
    """Where its turn ends: between `end` and `limit` lies whatever closes the turn."""
    last: bool
    """No other turn follows."""


def learned_turns(turns: Sequence[Turn], loss_on: str) -> list[int]:
    """Which turns are learned: all of the assistant's, or the last of them."""
    places = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    return places[-1:] if loss_on == "last" else places


def find_spans(template: ChatTemplate, turns: Sequence[Turn], text: str, places: Sequence[int]) -> list[Span]:
    """The spans of the turns at `places` in `text`, the rendered conversation. Raises Refused if one is not there."""
    spans: list[Span] = []
    for place in places:
        start, end = _answer(template, turns, text, place)
        if end <= start or (spans and start < spans[-1].end):
            raise Refused(_not_found())
        last = place == len(turns) - 1
        limit = len(text) if last else end + _closing(template, turns[: place + 1], text, end)
        spans.append(Span(start, end, limit, last))
    return spans


def _answer(template: ChatTemplate, turns: Sequence[Turn], text: str, place: int) -> tuple[int, int]:
    prompt = _try(template, turns[:place], prompt=True)
    start = len(prompt) if prompt and text.startswith(prompt) else None
    words = turns[place].text
    if start is not None:
        if text.startswith(words, start):
            return start, start + len(words)
        bare = words.strip()  # most templates trim
        skipped = start + len(text[start : start + 8]) - len(text[start : start + 8].lstrip())
        if text.startswith(bare, skipped):
            return start, skipped + len(bare)
    changed = [*turns[:place], Turn("assistant", _OTHER), *turns[place + 1 :]]
    other = template.render(changed)
    if _OTHER not in other:
        raise Refused(_not_found())
    found, rest = _common_prefix(text, other), _common_prefix(text[::-1], other[::-1])
    end = len(text) - rest
    return (start if start is not None and start <= found else found), end


def _closing(template: ChatTemplate, turns: Sequence[Turn], text: str, end: int) -> int:
    """How many characters after `end` close the last of `turns`: those that follow it also where nothing comes after."""
    alone = _try(template, turns)
    if not alone:
        return 0
    alone_end = end if alone.startswith(text[:end]) else _answer(template, turns, alone, len(turns) - 1)[1]
    return _common_prefix(text[end:], alone[alone_end:])


def _try(template: ChatTemplate, turns: Sequence[Turn], prompt: bool = False) -> str:
    """"" where a template refuses so short a conversation."""
    try:
        return template.render(turns, prompt=prompt) if turns else ""
    except Refused:
        return ""


def _not_found() -> str:
    return t(pt="a resposta não aparece no texto que ele escreve", en="the answer does not appear in what it writes")


def _common_prefix(one: str, other: str) -> int:
    same = (a == b for a, b in zip(one, other, strict=False))
    return next((place for place, alike in enumerate(same) if not alike), min(len(one), len(other)))
