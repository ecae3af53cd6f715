"""What reads captions for FLUX.2: three layers of a language model side by side, with its padding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...bases.tokenizers import fingerprint
from ...diffusion import llm_text
from ...diffusion.captions import Reader
from ...seam.family import Batch, Example
from .variant import Release


@dataclass(frozen=True)
class ThreeLayers(Reader):
    release: Release

    @property
    def limit(self) -> int:
        return max(0, self.tokens - len(self.ids("")))

    def facts(self) -> list[Any]:
        return [fingerprint(self.tokenizer), self.tokens, self.release.template, self.release.layers]

    def ids(self, caption: str) -> list[int]:
        """With the chat's words around it; `[IMG]` would stand for a picture."""
        caption = caption.replace("[IMG]", "") if self.release.pads_left else caption
        text = self.release.template.format(caption)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def tokenize(self, caption: str) -> Example:
        ids, pad = self.ids(caption)[: self.tokens], self.tokenizer.pad_token_id
        pad = self.tokenizer.convert_tokens_to_ids(self.release.pad) if pad is None else pad
        example = llm_text.padded(ids, self.tokens, int(pad))
        turn = self.tokens - len(ids) if self.release.pads_left else 0
        return {name: value.roll(turn) for name, value in example.items()}

    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        encoder, ids, mask = model["text_encoder"], batch["input_ids"], batch["attention_mask"]
        return {"prompt_embeds": torch.cat(llm_text.hidden_states(encoder, ids, mask, self.release.layers), -1)}
