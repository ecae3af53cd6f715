"""Answers during training: those of each prompt alone, and, where memory runs out, one at a time."""

from types import SimpleNamespace

import pytest
import torch
from helpers.language import write_base
from helpers.out_of_memory import RunsOut

from lora_trainer.config.schema import Config, ModelConfig
from lora_trainer.families.causal_lm.family import CausalLM
from lora_trainer.files.sources import open_source
from lora_trainer.techniques import MemoryPlan
from lora_trainer.text import templates
from lora_trainer.text.preview import TextPreviews

CPU = torch.device("cpu")
PROMPTS = ["pergunta número 3?", "sim", "a resposta 4 é simples, ou não é?"]


@pytest.fixture
def drawn(tmp_path):
    """Previews, the model, and the rungs that were told."""
    base, told = write_base(tmp_path / "base"), []
    family = CausalLM.open(open_source(str(base)), ModelConfig(base_model=str(base)))
    desk = SimpleNamespace(config=Config(), device=CPU, terminal=None, metrics=None, heard=lambda *rung: told.append(rung))
    previews = TextPreviews(family, templates.choose(family.tokenizer(), "auto", ["messages"]), desk)
    previews.plan = MemoryPlan(())
    return previews, family.load_model(CPU, torch.float32), told


def test_answers_together_are_those_alone(drawn):
    previews, model, told = drawn
    alone = [previews._answers(model, [prompt], 12)[0] for prompt in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    assert previews._answers(model, PROMPTS, 12) == alone
    assert told == []


def test_where_memory_runs_out_each_answer_is_made_alone(drawn):
    previews, model, told = drawn
    expected = previews._answers(model, PROMPTS, 12)
    with RunsOut({50}) as watch:
        assert previews._answers(model, PROMPTS, 12) == expected
    assert watch.raised == 1
    assert told == [("preview", "alone")]
    with RunsOut({50}), pytest.raises(torch.OutOfMemoryError):
        previews._answers(model, PROMPTS, 12)
    assert previews._answers(model, PROMPTS, 12) == expected
    assert told == [("preview", "alone")]
