"""What reads captions for a diffusion transformer: T5 alone, CLIP and T5, or a language model inside a template.

A `Reader` turns a caption into token ids, and these, stacked, into what the transformer is given. `facts` is all that the
answer depends on besides the encoders' weights.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..bases.tokenizers import fingerprint
from ..seam.family import Batch, Example
from . import llm_text
from .clip_text import Chunks
from .prompts import MASK


@dataclass(frozen=True)
class Reader(ABC):
    """Of captions, by `tokenizer`, up to `tokens` of them."""

    tokenizer: Any
    tokens: int

    @property
    @abstractmethod
    def limit(self) -> int:
        """Tokens of a caption that count."""

    def facts(self) -> list[Any]:
        return [fingerprint(self.tokenizer), self.tokens]

    def count(self, caption: str) -> int:
        """Tokens without marks and padding."""
        return count_tokens(self.tokenizer, caption)

    @abstractmethod
    def tokenize(self, caption: str) -> Example: ...

    @abstractmethod
    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """What `tokenize` made, stacked -> prompt embeds, and MASK (B, L) where padding is not to be attended to."""


def count_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def t5_ids(tokenizer: Any, caption: str, tokens: int) -> tuple[Tensor, int]:
    """(L,) with the end mark, padded with 0; and how many of them are real."""
    ids = tokenizer(caption, max_length=tokens, truncation=True).input_ids
    return torch.tensor([*ids, *[0] * (tokens - len(ids))], dtype=torch.int64), len(ids)


@dataclass(frozen=True)
class T5(Reader):
    """T5 alone, its padding masked; the transformer sees `padding` tokens of it."""

    padding: int = 0

    @property
    def limit(self) -> int:
        return self.tokens - 1  # the end mark

    def tokenize(self, caption: str) -> Example:
        ids, length = t5_ids(self.tokenizer, caption, self.tokens)
        return {"input_ids": ids, "lengths": torch.tensor(length)}

    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        encoder, ids = cast(Any, model["text_encoder"]), batch["input_ids"]
        places, lengths = torch.arange(ids.shape[1], device=ids.device), batch["lengths"][:, None]
        embeds = encoder(input_ids=ids, attention_mask=(places < lengths).long()).last_hidden_state
        return {"prompt_embeds": embeds, MASK: places < lengths + self.padding}


@dataclass(frozen=True)
class ClipAndT5(Reader):
    """CLIP gives the pooled text; T5 the sequence, of full length and without a mask."""

    clip: Chunks

    @property
    def limit(self) -> int:
        return self.tokens - 1  # the end mark

    def facts(self) -> list[Any]:
        return [fingerprint(self.clip.tokenizer), *super().facts()]

    def tokenize(self, caption: str) -> Example:
        return {"input_ids": self.clip.ids(caption), "input_ids_2": t5_ids(self.tokenizer, caption, self.tokens)[0]}

    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        clip, t5 = cast(Any, model["text_encoder"]), cast(Any, model["text_encoder_2"])
        pooled = clip(input_ids=batch["input_ids"][:, 0]).pooler_output
        return {"pooled_embeds": pooled, "prompt_embeds": t5(input_ids=batch["input_ids_2"]).last_hidden_state}


@dataclass(frozen=True)
class LanguageModel(Reader):
    """A language model reads the caption inside a template, which `words` make up: `{}` stands for the caption.

    What it makes of the first `dropped` tokens is left out. A caption too long loses its own end, not the last `kept` tokens.
    """

    words: tuple[str, ...]
    layer: int
    """Whose hidden states they are."""
    dropped: int = 0
    kept: int = 0
    empty: str = ""
    """Stands for a caption without a letter."""
    around: tuple[str, ...] = ()
    """What of the template is seen beside the caption."""

    @property
    def limit(self) -> int:
        return self.tokens - sum(self.count(words) for words in self.around)

    def facts(self) -> list[Any]:
        return [*super().facts(), *self.words]

    def tokenize(self, caption: str) -> Example:
        ids = self.tokenizer("".join(self.words).format(caption or self.empty), verbose=False).input_ids
        most = self.dropped + self.tokens
        if self.kept and len(ids) > most:
            ids = [*ids[: most - self.kept], *ids[-self.kept :]]
        return llm_text.padded(ids, most, self.tokenizer.pad_token_id or 0)

    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        ids, mask = llm_text.cut_padding(batch["input_ids"], batch["attention_mask"])
        [embeds] = llm_text.hidden_states(model["text_encoder"], ids, mask, (self.layer,))
        return {"prompt_embeds": embeds[:, self.dropped :], MASK: mask[:, self.dropped :]}
