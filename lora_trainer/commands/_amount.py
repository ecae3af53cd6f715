"""How much there is to do: optimizer steps, and bytes on disk. Files are counted, not opened."""

from dataclasses import dataclass
from pathlib import Path

from ..config.schema import Config
from ..data.walk import folder_repeats, walk
from ..planner.ask import MAPPED_MASTER
from ..planner.foresee import Foresight

STATES_KEPT = 2
"""A state is written beside the one before it."""


@dataclass(frozen=True)
class Amount:
    """`draws`: images an epoch, each counted as often as it appears in it."""

    images: int
    draws: int
    steps: int


def amount_of(config: Config) -> Amount | None:
    """None where there is no folder of images yet. Images that a run would leave out are not known here."""
    data, training = config.data, config.training
    if data.data_dir is None or not Path(data.data_dir).is_dir():
        return None
    own = [Path(p) for p in (config.output.dir, data.cache_dir, data.mask_dir, data.regularization_dir) if p]
    images = draws = 0
    for folder in walk(Path(data.data_dir), recursive=data.recursive, exclude=own).folders:
        repeats, _ = folder_repeats(folder.path, Path(data.data_dir))
        times = data.repeats if data.repeats is not None else 1 if repeats is None else repeats
        images += len(folder.images)
        draws += len(folder.images) * times
    if data.validation_fraction:
        draws -= round(draws * data.validation_fraction)
    if data.regularization_dir and Path(data.regularization_dir).is_dir():
        draws *= 2  # as many images of the class as of the subject
    batches = -(-draws // training.batch_size)
    steps = training.epochs * -(-batches // training.gradient_accumulation_steps)
    return Amount(images, draws, min(steps, training.max_steps or steps))


def disk_bytes(found: Foresight, config: Config, amount: Amount | None) -> int:
    """Cache, saved states, and the file that blocks are streamed from where RAM is short."""
    views = (2 if config.data.flip else 1) * (config.data.crop_variants if config.data.crop == "random" else 1)
    of_image, of_caption = found.cache_bytes
    cache = amount.images * (views * of_image + of_caption) if amount else 0
    mapped = found.host if found.values.get(MAPPED_MASTER) == "yes" else 0
    return cache + STATES_KEPT * found.adapter_bytes + mapped
