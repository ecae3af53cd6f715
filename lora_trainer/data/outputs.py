"""The files an image run leaves: adapters with their metadata, each checked by the consumer's loader."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

from torch import nn

from ..adapters import Adapter
from ..export.metadata import RunFacts, describe
from ..export.verify import verify
from ..export.write import Format, save_adapter
from ..modality import Outputs
from ..modality import RunFacts as Run
from ..seam.family import ImageFamily
from .batches import BatchPlan


class ImageOutputs(Outputs[ImageFamily, BatchPlan]):
    def __init__(self, run: Run, family: ImageFamily, batches: BatchPlan) -> None:
        super().__init__(run, family, batches)
        self.folder = replace(run.folder, usual=next(iter(family.formats)))

    def _write(self, adapter: Adapter, format_: str, path: Path, step: int) -> None:
        metadata = describe(self.family, self.config, self._facts(step))
        save_adapter(adapter, self.family, path, cast(Format, format_), self.config.output.precision, metadata)

    def _proved(self, model: nn.ModuleDict, adapter: Adapter, path: Path, step: int) -> str:
        return verify(model, adapter, self.family, path, self.family.probe).line(f"{step}/{self.run.total}")

    def _facts(self, step: int) -> RunFacts:
        tags: dict[str, Counter[str]] = {}
        buckets: Counter[tuple[int, int]] = Counter()
        dataset = self.batches.dataset
        for item in dataset.training:
            folder = item.name.rpartition("/")[0].rpartition("/")[2] or "."
            words = (tag.strip() for text in item.caption.texts for tag in text.split(self.config.data.separator))
            tags.setdefault(f"{item.repeats}_{folder}", Counter()).update(word for word in words if word)
            if item.fit is not None:
                buckets[item.fit.target] += 1
        return RunFacts(
            name=self.run.loaded.name,
            date=self.run.day,
            seed=int(self.config.system.seed or 0),
            step=step,
            total_steps=self.run.total,
            epoch=-(-step // self.batches.steps_per_epoch),
            num_images=len(dataset.training),
            num_regularization_images=len(dataset.regularization),
            tag_frequency=tags,
            buckets=buckets,
        )
