"""A run that learns from images: checked, encoded ahead, previewed as pictures, saved as one file."""

from pathlib import Path
from typing import Any

from ..config.schema import Config, TrainingConfig
from ..errors import t
from ..modality import Desk, Modality, Progress, RunFacts
from ..modality.options import OF_TEXTS, unread
from ..planner.caching import Encoding
from ..seam.family import ImageFamily
from . import dataset as data
from .batches import BatchPlan, ImageLoader
from .cache import Cache
from .encode import EncodeCounts, Encoder, caches_text, encode_dataset
from .outputs import ImageOutputs
from .preview import ImagePreviews
from .report import summary_lines, token_lines


class Images(Modality):
    def __init__(self, family: ImageFamily, config: Config, cache_dir: Path) -> None:
        self.family, self.config, self.cache_dir = family, config, cache_dir
        self.trains_with_text = not caches_text(config.data.cache_text_encoder, config.model.train_text_encoder)

    def read(self, progress: Progress) -> tuple[list[str], list[str]]:
        self.dataset = data.build(
            self.config.data,
            self.cache_dir,
            side_multiple=self.family.side_multiple,
            exclude=[Path(self.config.output.dir)],
            progress=progress,
        )
        return [*unread(self.config, OF_TEXTS, "linguagem"), *self.dataset.notes.warnings], self.dataset.notes.notes

    def batches(self, training: TrainingConfig, seed: int) -> BatchPlan:
        return BatchPlan(self.dataset, training.batch_size, training.gradient_accumulation_steps, seed)

    def summary(self, batches: BatchPlan, epochs: int) -> list[str]:
        captions = token_lines(self.dataset, self.family.count_tokens, self.family.token_limit)
        return [*summary_lines(batches, epochs), *captions]

    def prepare(self, desk: Desk) -> tuple[Encoding, str]:
        dtype = desk.precision.frozen
        image_dtype = self.family.vae_dtype(dtype)
        cache = Cache(self.cache_dir)
        encoder = Encoder(
            self.family, cache, self.config.data, image_dtype, dtype, not self.trains_with_text, desk.encoding
        )
        self.previews = ImagePreviews(self.family, encoder, desk)
        with desk.terminal.steps() as progress:
            captions = self.previews.captions()
            counts = encode_dataset(self.dataset, encoder, desk.device, captions, progress, desk.heard)
        self.loader = ImageLoader(self.dataset, encoder, desk.seed)
        self.parts = encoder.parts
        return encoder.encoding, _counted(counts)

    def outputs(self, facts: RunFacts, batches: Any) -> ImageOutputs:
        return ImageOutputs(facts, self.family, batches)


def _counted(counts: EncodeCounts) -> str:
    return t(
        pt=f"cache: {counts.images} imagens ({counts.images_made} codificadas agora), "
        f"{counts.texts} legendas ({counts.texts_made} agora)",
        en=f"cache: {counts.images} images ({counts.images_made} encoded now), "
        f"{counts.texts} captions ({counts.texts_made} now)",
    )
