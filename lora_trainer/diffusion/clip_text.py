"""Captions to token ids to prompt embeds, for families whose text encoders are CLIP.

CLIP reads 77 tokens: a start mark, 75 of the caption and an end mark. Longer captions (150 or 225 tokens) are cut into
chunks of 75 which are encoded apart, each with its own marks, and laid end to end as A1111, Forge and ComfyUI do it, so
L is 77, 154 or 231. Every caption of a run has as many chunks, so that embeds of different captions stack. The rest of
a longer caption is dropped; `truncate_report` tells what.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..bases import architecture, tokenizers
from ..bases.components import Networks
from ..config.schema import ModelConfig
from ..errors import SourceError
from ..files.sources import Source
from .unet import text_body

CHUNK = 75


@dataclass(frozen=True)
class Chunks:
    """A tokenizer with the number of chunks that a run gives each caption."""

    tokenizer: Any
    count: int
    pad_id: int

    def tokens(self, caption: str) -> list[int]:
        """The caption's ids without marks, however many; the library's remark on long captions is not printed."""
        ids: list[int] = self.tokenizer(caption, add_special_tokens=False, truncation=False, verbose=False).input_ids
        return ids

    def ids(self, caption: str) -> Tensor:
        """(chunks, 77) int64: each [start] caption [end] padding…"""
        tokens, rows = self.tokens(caption), []
        for index in range(self.count):
            piece = tokens[index * CHUNK : (index + 1) * CHUNK]
            padding = [self.pad_id] * (CHUNK - len(piece))
            rows.append([self.tokenizer.bos_token_id, *piece, self.tokenizer.eos_token_id, *padding])
        return torch.tensor(rows, dtype=torch.int64)

    def truncate_report(self, caption: str) -> tuple[int, str]:
        """Number of tokens, and the text of those that do not fit ("" when all do)."""
        tokens = self.tokens(caption)
        dropped = tokens[self.count * CHUNK :]
        return len(tokens), self.tokenizer.decode(dropped).strip() if dropped else ""


def open_chunks(source: Source, settings: ModelConfig, networks: Networks, release: str, part: str, tokens: int | None) -> Chunks:
    """Of the text encoder `part`; `release`: the folder of arch/."""
    name = part.replace("text_encoder", "tokenizer")
    tokenizer = tokenizers.find_tokenizer(source, settings.tokenizer, name, architecture.shipped(release, name))
    vocabulary = int(networks.components[part].config.get("vocab_size", 49408))
    return make_chunks(tokenizer, tokens, vocabulary, source.what)


def make_chunks(tokenizer: Any, max_caption_tokens: int | None, vocabulary: int, what: str) -> Chunks:
    """`vocabulary`: rows of the text encoder's embedding, which must hold every id."""
    if len(tokenizer) > vocabulary:
        raise SourceError.said(
            pt=f"o tokenizador tem {len(tokenizer)} tokens e o codificador de texto só {vocabulary}",
            en=f"the tokenizer has {len(tokenizer)} tokens, the text encoder only {vocabulary}",
            hint_pt="indique em modelo.tokenizador o tokenizador deste modelo base",
            hint_en="name this base's own tokenizer in model.tokenizer",
            where=what,
        )
    count, rest = divmod(max_caption_tokens or CHUNK, CHUNK)
    assert not rest
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Chunks(tokenizer, count, int(pad))


def hidden_states(encoder: nn.Module, ids: Tensor, layer: int, *, normalised: bool) -> tuple[Tensor, Tensor | None]:
    """One layer's states of every chunk, laid end to end (B, chunks · 77, D), and the first chunk's pooled text (B, P).

    ids: (B, chunks, 77). `layer` counts from the end: 1 is the last. `normalised`: through the encoder's final norm.
    """
    batch, chunks, length = ids.shape
    output = encoder(input_ids=ids.reshape(batch * chunks, length), output_hidden_states=True)
    if layer == 1 and normalised:
        states = output.last_hidden_state
    else:
        states = output.hidden_states[-layer]
        states = text_body(encoder).final_layer_norm(states) if normalised else states
    pooled = getattr(output, "text_embeds", None)
    states = states.reshape(batch, chunks * length, -1)
    return states, pooled.reshape(batch, chunks, -1)[:, 0] if pooled is not None else None
