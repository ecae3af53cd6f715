"""Answers to fixed prompts during training, the base's beside the adapter's, in one Markdown file a preview.

Greedy, so that they can be compared; the base answers once. Whatever goes wrong is reported and forgotten. A measure (the
demo's behaviour score) looks at answers before and after training.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import Adapter
from ..errors import t
from ..families.causal_lm.family import CausalLM
from ..journal.run_folder import RunFolder
from ..modality import Desk
from ..runtime.recover import free_memory, is_out_of_memory
from ..techniques import MemoryPlan
from .schemas import Turn
from .templates import ChatTemplate

MEASURES = {"demo_language": "lora_trainer.demo.linguagem.score"}
"""`amostras.medida` -> module with PROMPTS, MAX_TOKENS and behaviour_score(answers)."""


TOGETHER = 16
"""Prompts answered at once."""


class TextPreviews:
    """`plan` is set when the model is built, and whenever it changes."""

    plan: MemoryPlan

    def __init__(self, family: CausalLM, template: ChatTemplate, desk: Desk) -> None:
        self.family, self.template, self.desk = family, template, desk
        self.settings, self.terminal, self.metrics = desk.config.samples, desk.terminal, desk.metrics
        self.base_answers: list[str] = []
        self.measure = _measure(self.settings.measure)
        self.score_before: float | None = None
        self.careful = False
        """After the first out-of-memory: one answer at a time."""

    def draw(self, model: nn.ModuleDict, adapter: Adapter, step: int, folder: RunFolder) -> None:
        """Save `amostras/passo-N.md`; a failure is told and training goes on."""
        prompts, most = self.settings.prompts, self.settings.max_tokens
        try:
            if not self.base_answers:
                with adapter.disabled():
                    self.base_answers = self._answers(model, prompts, most)
            answers = self._answers(model, prompts, most)
            path = folder.samples / f"passo-{step:06d}.md"
            path.write_text(_page(step, prompts, self.base_answers, answers), encoding="utf-8")
            self.metrics.event("preview", step=step, file=path.name)
        except Exception as error:  # whatever it is, training goes on
            if is_out_of_memory(error):
                self.desk.heard("preview", "skipped")
            self.terminal.warn(
                t(pt=f"amostra do passo {step} falhou: {error}", en=f"preview at step {step} failed: {error}")
            )
            self.metrics.event("preview_failed", step=step, problem=f"{type(error).__name__}: {error}")
        finally:
            free_memory(self.desk.device)

    def measure_before(self, model: nn.ModuleDict, adapter: Adapter) -> None:
        if self.measure:
            with adapter.disabled():
                self.score_before = self._score(model)

    def measure_after(self, model: nn.ModuleDict) -> None:
        if self.measure is None or self.score_before is None:
            return
        after = self._score(model)
        self.metrics.event("behaviour_score", before=self.score_before, after=after)
        scores = f"{self.score_before:.2f} → {after:.2f}"
        self.terminal.say(
            t(pt=f"nota do comportamento, antes → depois: {scores}", en=f"behaviour score, before → after: {scores}")
        )

    def _score(self, model: nn.ModuleDict) -> float:
        return float(self.measure.behaviour_score(self._answers(model, self.measure.PROMPTS, self.measure.MAX_TOKENS)))

    def _answers(self, model: nn.ModuleDict, prompts: Sequence[str], most: int) -> list[str]:
        """Some together; from the first out-of-memory on, each alone."""
        if not self.careful:
            try:
                parts = [prompts[at : at + TOGETHER] for at in range(0, len(prompts), TOGETHER)]
                return [answer for part in parts for answer in self._generated(model, part, most)]
            except Exception as error:
                if not is_out_of_memory(error) or len(prompts) == 1:
                    raise
            self.careful = True
            free_memory(self.desk.device)
            self.desk.heard("preview", "alone")
        return [self._generated(model, [prompt], most)[0] for prompt in prompts]

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


def _measure(name: str | None) -> Any:
    return None if name is None else importlib.import_module(MEASURES[name])
