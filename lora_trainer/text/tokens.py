"""Examples to token ids, and which of them are learned.

A conversation is rendered once and tokenised once, exactly as `tokenizer.apply_chat_template` does at inference (so
there is never a second BOS); the answers are then marked through character offsets. What closes a learned turn is
learned with it: the special token that follows it (`<|im_end|>`, `<|eot_id|>`, …), else the template's closing text
and EOS. Padding is never told by its token, so a tokenizer whose pad is its EOS does no harm. The first token of an
example predicts nothing and is never a target. What exceeds `max_length` is cut from the end, counted, and gets no EOS;
plain text is split into pieces instead, and none of it is lost.
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.notes import Notes
from ..errors import SourceError, t
from .schemas import Conversation, Text, TextExample, Turn
from .spans import Span, find_spans, learned_turns
from .templates import ChatTemplate, Refused

IGNORED = -100
_BATCH = 256
"""Examples tokenised at once: the library's own record of them takes far more memory than their ids."""

Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Tokenised:
    input_ids: Ids
    """(L,)"""
    learned: Mask
    """(L,): the targets. The first is never one."""
    where: str
    content: str
    """The example's own hash: pieces of one text share it."""
    uid: str = ""
    """Differs between any two examples of a set, and does not depend on their order in the files."""

    @property
    def labels(self) -> Ids:
        """(L,) ids, -100 where nothing is learned; not shifted."""
        return np.where(self.learned, self.input_ids, np.int32(IGNORED))

    @property
    def targets(self) -> int:
        return int(self.learned.sum())

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass
class Counts:
    """What tokenising cost."""

    truncated: list[str] = field(default_factory=list)
    """Where the examples cut at `max_length` came from."""
    tokens_lost: int = 0
    targets_lost: int = 0
    split: int = 0
    """Texts split into pieces."""
    swallowed: list[str] = field(default_factory=list)
    """Where an answer's first letters were taken into a token of the prompt, and so are not learned."""
    without_target: dict[str, int] = field(default_factory=dict)
    """Where -> tokens before the cut, of examples in which nothing is left to learn."""


def check_tokenizer(tokenizer: Any) -> None:
    """Raises SourceError for one that nothing can be taught with."""
    if not getattr(tokenizer, "is_fast", False):
        raise SourceError.said(
            pt="o tokenizador não informa a posição de cada token no texto (não é um tokenizador rápido)",
            en="the tokenizer does not tell where in the text each token lies (it is no fast tokenizer)",
        )
    if tokenizer.eos_token_id is None:
        raise SourceError.said(
            pt="o tokenizador não tem token de fim (eos_token)",
            en="the tokenizer has no end token (eos_token)",
            hint_pt="sem ele o modelo não aprende a parar; defina-o no tokenizer_config.json",
            hint_en="without it the model cannot learn to stop; set it in tokenizer_config.json",
        )


class TextEncoder:
    """Tokenises with one tokenizer, template and limit; `counts` and `notes` tell what happened."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, max_length: int, loss_on: str, notes: Notes) -> None:
        self.tokenizer, self.template, self.notes = tokenizer, template, notes
        self.max_length, self.loss_on = max_length, loss_on
        self.counts = Counts()
        self.bos, self.eos = tokenizer.bos_token_id, int(tokenizer.eos_token_id)
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = added | set(tokenizer.all_special_ids)

    def encode(self, examples: Sequence[TextExample], progress: Callable[[str, int, int], None]) -> list[Tokenised]:
        out: list[Tokenised] = []
        for start in range(0, len(examples), _BATCH):
            part = examples[start : start + _BATCH]
            chats = dict(self._chats([e for e in part if isinstance(e, Conversation)]))
            texts = dict(self._texts([e for e in part if isinstance(e, Text)]))
            for example in part:
                for ids, learned in chats.get(id(example)) or texts.get(id(example)) or []:
                    out += self._kept(example, ids, learned)
            progress("tokenise", start + len(part), len(examples))
        return with_uids(out)

    # -- conversations

    def _chats(self, chats: Sequence[Conversation]) -> Iterator[tuple[int, list[tuple[Ids, Mask]]]]:
        rendered: list[tuple[Conversation, tuple[Turn, ...], str]] = []
        for chat in chats:
            turns = self.template.fitted(chat.turns)
            try:
                rendered.append((chat, turns, self.template.render(turns)))
            except Refused as refusal:
                self._refused(chat, refusal)
        if not rendered:
            return
        encodings = self._tokenised([text for _, _, text in rendered], special=False).encodings
        for (chat, turns, text), encoding in zip(rendered, encodings, strict=True):
            try:
                yield id(chat), [self._marked(turns, text, encoding, chat.where)]
            except Refused as refusal:
                self._refused(chat, refusal)

    def _refused(self, chat: Conversation, refusal: Refused) -> None:
        reason = t(pt="o formato de conversa recusou", en="the chat template refused")
        self.notes.exclude(f"{reason}: {refusal}", chat.where)

    def _marked(self, turns: Sequence[Turn], text: str, encoding: Any, where: str) -> tuple[Ids, Mask]:
        ids = np.array(encoding.ids, dtype=np.int32)
        learned = np.zeros(len(ids), dtype=np.bool_)
        places = learned_turns(turns, self.loss_on)
        ended, swallowed = True, False
        for span in find_spans(self.template, turns, text, places):
            ended = self._mark(span, text, ids, learned, encoding)
            first = _first_token(text, encoding, span, len(ids))
            swallowed |= first > 0 and encoding.token_to_chars(first - 1)[1] > span.start
        if swallowed:
            self.counts.swallowed.append(where)
        if not ended:
            ids, learned = np.append(ids, np.int32(self.eos)), np.append(learned, True)
        if self.loss_on == "all":
            learned[:] = True
        return ids, learned

    def _mark(self, span: Span, text: str, ids: Ids, learned: Mask, encoding: Any) -> bool:
        """Mark one answer and what closes it; False if the conversation ends in it without any end token."""
        first, stop = _first_token(text, encoding, span, len(ids)), _token_from(encoding, span.end, len(ids))
        learned[first:stop] = True
        closing = stop
        while closing < len(ids) and _blank(text, encoding, closing):
            closing += 1
        if closing < len(ids) and ids[closing] in self._special and encoding.token_to_chars(closing)[1] <= span.limit:
            learned[stop : closing + 1] = True
            if span.last:  # some write EOS after the token that ends the turn
                learned[closing + 1 :] = ids[closing + 1 :] == self.eos
            return True
        if span.last:  # EOS comes after it: whatever lies between must be learned too, or EOS is never reached
            learned[stop:] = True
            return False
        closed = span.end + len(text[span.end : span.limit].rstrip())
        learned[stop : _token_from(encoding, closed, len(ids))] = True
        return True

    # -- plain texts

    def _texts(self, texts: Sequence[Text]) -> Iterator[tuple[int, list[tuple[Ids, Mask]]]]:
        if not texts:
            return
        for text, ids in zip(texts, self._tokenised([e.text for e in texts], special=True).input_ids, strict=True):
            yield id(text), [(piece, np.ones(len(piece), dtype=np.bool_)) for piece in self._pieces(ids)]

    def _pieces(self, ids: list[int]) -> list[Ids]:
        """The whole text in pieces of at most `max_length`; each begins with BOS if the tokenizer writes one, and only
        the last ends with EOS."""
        start = ids[:1] if ids and ids[0] == self.bos else []
        body = ids[len(start) :]
        body = body[1:] if start and body[:1] == start else body  # the text brought its own
        body = body if body[-1:] == [self.eos] else [*body, self.eos]
        room = self.max_length - len(start)
        cuts = range(0, len(body), room)
        self.counts.split += len(cuts) > 1
        return [np.array([*start, *body[cut : cut + room]], dtype=np.int32) for cut in cuts]

    # -- both

    def _tokenised(self, texts: list[str], *, special: bool) -> Any:
        return self.tokenizer(
            texts, add_special_tokens=special, padding=False, truncation=False, return_attention_mask=False, verbose=False
        )

    def _kept(self, example: TextExample, ids: Ids, learned: Mask) -> list[Tokenised]:
        """The example cut at the limit; nothing if no target is left."""
        learned[:1] = False
        limit = self.max_length
        if len(ids) > limit:
            self.counts.truncated.append(example.where)
            self.counts.tokens_lost += len(ids) - limit
            self.counts.targets_lost += int(learned[limit:].sum())
        if not learned[:limit].any():
            self.counts.without_target[example.where] = len(ids)
            return []
        return [Tokenised(ids[:limit].copy(), learned[:limit].copy(), example.where, example.content)]


def with_uids(examples: Sequence[Tokenised]) -> list[Tokenised]:
    """Hash of what is trained on, numbered where two examples are alike."""
    seen: Counter[str] = Counter()
    out = []
    for e in examples:
        digest = hashlib.blake2b(e.input_ids.tobytes() + e.learned.tobytes(), digest_size=12).hexdigest()
        out.append(Tokenised(e.input_ids, e.learned, e.where, e.content, f"{digest}-{seen[digest]}"))
        seen[digest] += 1
    return out


def _token_from(encoding: Any, char: int, count: int) -> int:
    """The first token that starts at or after `char`."""
    return bisect_left(range(count), char, key=lambda token: encoding.token_to_chars(token)[0])


def _first_token(text: str, encoding: Any, span: Span, count: int) -> int:
    """The first token of an answer; one that only took the white space before it along is the answer's."""
    first = _token_from(encoding, span.start, count)
    if first > 0:
        start, end = encoding.token_to_chars(first - 1)
        if end > span.start and not text[start : span.start].strip():
            return first - 1
    return first


def _blank(text: str, encoding: Any, token: int) -> bool:
    start, end = encoding.token_to_chars(token)
    return not text[start:end].strip()
