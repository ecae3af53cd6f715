"""Answers to fixed prompts during training, the base's beside the adapter's, in one Markdown file a preview."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from ..errors import t
from ..families.causal_lm.family import CausalLM
from ..modality import Desk, Previews
from .schemas import Turn
from .templates import ChatTemplate

TOGETHER = 16
"""Prompts answered at once."""


class TextPreviews(Previews[str]):
    """Greedy, so that they can be compared; with care, one answer at a time."""

    ending, care = ".md", "alone"
    measures: ClassVar = {"demo_language": "lora_trainer.demo.linguagem.score"}
    score, score_title = "behaviour_score", ("nota do comportamento", "behaviour score")
    others = ("olha imagens; este é um modelo de linguagem", "looks at images")

    def __init__(self, family: CausalLM, template: ChatTemplate, desk: Desk) -> None:
        super().__init__(desk)
        self.family, self.template = family, template

    def _usual(self) -> int:
        return self.settings.max_tokens

    def _measured(self) -> int:
        return int(self.measure.MAX_TOKENS)

    def _write(self, path: Path, step: int, answers: list[str]) -> None:
        path.write_text(_page(step, self.settings.prompts, self.base, answers), encoding="utf-8")

    def _drawn(self, model: nn.ModuleDict, prompts: Sequence[str], how: int) -> list[str]:
        most = 1 if self.careful else TOGETHER
        parts = [prompts[at : at + most] for at in range(0, len(prompts), most)]
        return [answer for part in parts for answer in self._generated(model, part, how)]

    @torch.no_grad()
    def _generated(self, model: nn.ModuleDict, prompts: Sequence[str], most: int) -> list[str]:
        tokenizer = self.template.tokenizer
        texts = [self.template.render([Turn("user", prompt)], prompt=True) for prompt in prompts]
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ids = [tokenizer(text, add_special_tokens=False).input_ids or [start] for text in texts]
        with self.plan.step_context():
            answers = self.family.generate(model, ids, most, self._stops())
        return [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in answers]

    def _stops(self) -> list[int]:
        """The end of a text, and what this template ends the assistant's turn with."""
        tokenizer = self.template.tokenizer
        marker = "\u0001"
        ended = self.template.render([Turn("user", "?"), Turn("assistant", marker)]).partition(marker)[2]
        first = tokenizer(ended, add_special_tokens=False).input_ids[:1]
        special = [token for token in first if token in tokenizer.all_special_ids]
        return list(dict.fromkeys([*special, tokenizer.eos_token_id]))


def _page(step: int, prompts: Sequence[str], base: Sequence[str], trained: Sequence[str]) -> str:
    title = t(pt=f"# Amostras do passo {step}", en=f"# Previews at step {step}")
    parts = [title]
    for prompt, before, after in zip(prompts, base, trained, strict=True):
        parts += [f"## {prompt}", f"**base:** {before}", f"**LoRA:** {after}"]
    return "\n\n".join(parts) + "\n"
