"""The files an image run leaves: adapters with their metadata, each checked by the consumer's loader."""

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import t
from ..export.metadata import RunFacts, describe
from ..export.verify import verify
from ..export.write import Format, save_adapter
from ..journal.run_folder import keep_last
from ..modality import Outputs
from ..modality import RunFacts as Run
from ..seam.family import Family
from .batches import BatchPlan

log = logging.getLogger(__name__)


class ImageOutputs(Outputs):
    def __init__(self, run: Run, family: Family, batches: BatchPlan) -> None:
        self.loaded, self.family = run.loaded, family
        self.folder = replace(run.folder, usual=next(iter(family.formats)))
        self.dataset, self.steps_per_epoch = batches.dataset, batches.steps_per_epoch
        self.day, self.total = run.day, run.total
        self.formats = family.chosen_formats(run.loaded.config.output.formats)
        self.written: list[Path] = []

    def save(self, adapter: Adapter, step: int, *, intermediate: bool) -> list[Path]:
        """Write every format asked for; intermediate files beyond `manter_ultimos` go."""
        output, paths = self.loaded.config.output, []
        metadata = describe(self.family, self.loaded.config, self._facts(step))
        for format_ in self.formats:
            path = self.folder.adapter(format_, step if intermediate else None)
            with host_memory():
                paths.append(save_adapter(adapter, self.family, path, cast(Format, format_), output.precision, metadata))
            keep_last(self.folder.intermediate(format_), output.keep_last)
        self.written = paths
        if adapter.is_untrained():
            log.warning(_no_effect(step))
        return paths

    def finish(self, model: nn.ModuleDict, adapter: Adapter, step: int) -> list[str]:
        """Write the final files and prove each; the lines that "done" prints."""
        lines = []
        for path in self.save(adapter, step, intermediate=False):
            checked = verify(model, adapter, self.family, path, self.family.probe)
            lines.append(checked.line(f"{step}/{self.total}"))
        return lines

    def _facts(self, step: int) -> RunFacts:
        tags: dict[str, Counter[str]] = {}
        buckets: Counter[tuple[int, int]] = Counter()
        for item in self.dataset.training:
            folder = item.name.rpartition("/")[0].rpartition("/")[2] or "."
            words = (
                tag.strip() for text in item.caption.texts for tag in text.split(self.loaded.config.data.separator)
            )
            tags.setdefault(f"{item.repeats}_{folder}", Counter()).update(word for word in words if word)
            if item.fit is not None:
                buckets[item.fit.target] += 1
        return RunFacts(
            name=self.loaded.name,
            date=self.day,
            seed=int(self.loaded.config.system.seed or 0),
            step=step,
            total_steps=self.total,
            epoch=-(-step // self.steps_per_epoch),
            num_images=len(self.dataset.training),
            num_regularization_images=len(self.dataset.regularization),
            tag_frequency=tags,
            buckets=buckets,
        )

    def last_good(self) -> str:
        """Where the last usable result is, for a run that diverged."""
        files = [path for format_ in self.formats for path in self.folder.intermediate(format_)]
        if files:
            return t(pt=f"último arquivo bom: {files[-1]}", en=f"last good file: {files[-1]}")
        states = sorted(self.folder.state.glob("passo-*"))
        if states:
            return t(pt=f"último estado bom: {states[-1]}", en=f"last good state: {states[-1]}")
        return t(pt="nenhum arquivo tinha sido salvo ainda", en="no file had been saved yet")


def _no_effect(step: int) -> str:
    return t(
        pt=f"no passo {step} o LoRA ainda é nulo (não soma nada a nenhum peso): o arquivo não muda nada em nenhum "
        "programa; confira treino.taxa_aprendizado, treino.aquecimento e se a perda é maior que zero",
        en=f"at step {step} the LoRA is still null (it adds nothing to any weight): the file changes nothing in any program; "
        "check training.learning_rate, training.lr_warmup and that the loss is above zero",
    )
