"""A run that learns from texts: tokenised in memory, previewed as answers, saved as a PEFT folder, GGUF or a merged model."""

from pathlib import Path
from typing import Any

from ..config.schema import Config, TrainingConfig
from ..data.notes import counted
from ..errors import t
from ..families.causal_lm.family import CausalLM
from ..modality import Desk, Modality, Progress, RunFacts
from ..planner.caching import Encoding
from .batches import TextBatchPlan, TextLoader
from .checks import check_options, check_vocabulary, length_warnings, option_warnings
from .dataset import TextDataset, build
from .outputs import TextOutputs
from .preview import TextPreviews
from .report import summary_lines


class Texts(Modality):
    dataset: TextDataset

    def __init__(self, family: CausalLM, config: Config) -> None:
        self.family, self.config = family, config
        self.tokenizer: Any = None

    def read(self, progress: Progress) -> tuple[list[str], list[str]]:
        check_options(self.family, self.config)
        self.tokenizer = self.family.tokenizer()
        packs = self.config.data.packing != "no" and self.family.packs
        data = self.config.data.model_copy(update={"packing": "yes" if packs else "no"})
        self.dataset = build(data, self.tokenizer, exclude=[Path(self.config.output.dir)], progress=progress)
        check_vocabulary(self.family, self.dataset)
        ours = [*option_warnings(self.family, self.config), *length_warnings(self.family, self.dataset)]
        return [*ours, *self.dataset.notes.warnings], self.dataset.notes.notes

    def batches(self, training: TrainingConfig, seed: int) -> TextBatchPlan:
        return TextBatchPlan(self.dataset, training.batch_size, training.gradient_accumulation_steps, seed)

    def summary(self, batches: TextBatchPlan, epochs: int) -> list[str]:
        return summary_lines(batches, epochs, self.tokenizer)

    def prepare(self, desk: Desk) -> tuple[Encoding, str]:
        self.loader = TextLoader(self.dataset, desk.seed)
        self.previews = TextPreviews(self.family, self.dataset.template, desk)
        count = len(self.dataset.examples)
        examples = counted(count, t(pt="exemplo", en="example"), t(pt="exemplos", en="examples"))
        return desk.encoding, t(pt=f"{examples} em tokens", en=f"{examples} in tokens")

    def outputs(self, facts: RunFacts, batches: TextBatchPlan) -> TextOutputs:
        return TextOutputs(facts, self.family, batches, self.tokenizer)
