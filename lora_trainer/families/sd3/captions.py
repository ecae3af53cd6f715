"""What reads captions for SD3: two CLIPs side by side, and T5 after them, which may be left out."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import pad

from ...bases.tokenizers import fingerprint
from ...diffusion import clip_text
from ...diffusion.captions import Reader, t5_ids
from ...seam.family import Batch, Example

CLIP_TOKENS = clip_text.CHUNK + 2


@dataclass(frozen=True)
class ClipsAndT5(Reader):
    """`tokenizer` is T5's, or the first CLIP's where there is no T5."""

    clips: tuple[clip_text.Chunks, ...]
    t5: Any
    width: int
    """Of prompt embeds."""

    @property
    def limit(self) -> int:
        return self.tokens - 1 if self.t5 is not None else clip_text.CHUNK  # but for the end mark

    def facts(self) -> list[Any]:
        found = [fingerprint(clip.tokenizer) for clip in self.clips]
        return found if self.t5 is None else [*found, fingerprint(self.t5), self.tokens]

    def tokenize(self, caption: str) -> Example:
        first, second = self.clips
        both = {"input_ids": first.ids(caption), "input_ids_2": second.ids(caption)}
        return both if self.t5 is None else {**both, "input_ids_3": t5_ids(self.t5, caption, self.tokens)[0]}

    def encode(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Without T5, the 77 tokens of the CLIPs alone; `predict` adds the zeros."""
        first, second = (
            cast(Any, model[part])(input_ids=batch[ids][:, 0], output_hidden_states=True)
            for part, ids in (("text_encoder", "input_ids"), ("text_encoder_2", "input_ids_2"))
        )
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        states = pad(states, (0, self.width - states.shape[-1]))
        if "text_encoder_3" in model:
            t5 = cast(Any, model["text_encoder_3"])
            states = torch.cat([states, t5(input_ids=batch["input_ids_3"]).last_hidden_state], 1)
        # CLIP-L's projection, where a folder has one, is the identity
        pooled = first.text_embeds if hasattr(first, "text_embeds") else first.pooler_output
        return {"prompt_embeds": states, "pooled_embeds": torch.cat([pooled, second.text_embeds], -1)}
