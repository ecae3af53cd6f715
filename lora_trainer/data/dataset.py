"""The checked, bucketed and split set of images that one run trains on.

Regularization (prior-preservation) images are repeated until there are as many as training
images, as in kohya's trainer; if there are more, the surplus is left out by name.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path

from ..config.fields import printable
from ..config.names import shown
from ..config.schema import DataConfig
from ..errors import ConfigError, t
from ..modality import Progress, no_progress
from .buckets import BucketRule, fit
from .check import FileIndex
from .held_out import hold_out
from .images import background_colour
from .notes import Notes, naming
from .scan import ImageItem, Scanner
from .variants import stable_hash

MUCH_CROPPED = 0.30


@dataclass(frozen=True)
class Dataset:
    config: DataConfig
    rule: BucketRule
    examples: tuple[ImageItem, ...]
    """Training images, then regularization images; every one has its `fit`."""
    validation: tuple[ImageItem, ...]
    notes: Notes

    @property
    def training(self) -> list[ImageItem]:
        return [item for item in self.examples if not item.regularization]

    @property
    def regularization(self) -> list[ImageItem]:
        return [item for item in self.examples if item.regularization]

    @property
    def draws_per_epoch(self) -> int:
        return sum(item.repeats for item in self.examples)

    def fingerprint(self) -> str:
        """Changes whenever a resumed run would see other images, sizes, captions or repeats."""
        digest = hashlib.sha256()
        for item in (*self.examples, *self.validation):
            digest.update(repr((item.uid, item.repeats, item.caption.texts, item.fit)).encode())
        return digest.hexdigest()


def build(
    config: DataConfig,
    cache_dir: Path,
    *,
    side_multiple: int = 64,
    exclude: Iterable[Path] = (),
    progress: Progress = no_progress,
) -> Dataset:
    """Scan the config's folders; `exclude`: folders of ours that may lie inside them. Raises all problems at once."""
    if config.data_dir is None:
        raise ConfigError(
            t(pt="falta dados.diretorio_dados: a pasta das imagens", en="data.data_dir is missing: the image folder")
        )
    background_colour(config.background)
    notes = Notes()
    rule = bucket_rule(config, side_multiple, notes)
    own = [*exclude, cache_dir, *(Path(p) for p in (config.mask_dir, config.regularization_dir) if p)]
    if config.regularization_dir is not None:
        _report_nesting(Path(config.data_dir), Path(config.regularization_dir), notes)
    index = FileIndex(cache_dir)
    try:
        scanner = Scanner(config, index, notes, progress)
        training = scanner.scan(Path(config.data_dir), exclude=own)
        priors = []
        if config.regularization_dir is not None:
            own = [*exclude, cache_dir, *(Path(p) for p in (config.mask_dir, config.data_dir) if p)]
            priors = scanner.scan(Path(config.regularization_dir), regularization=True, exclude=own)
    finally:
        index.close()
    notes.raise_errors()
    training, priors = _used(training, rule, config, notes), _used(priors, rule, config, notes)
    if not training:
        raise notes.nothing_left(pt="nenhuma imagem pode ser usada", en="no image can be used")
    two = ("duas imagens diferentes", "two different images")
    training, validation = hold_out(training, config.validation_fraction, notes, two)
    priors = matched(priors, sum(item.repeats for item in training), notes)
    return Dataset(config, rule, (*training, *priors), tuple(validation), notes)


def _report_nesting(data_dir: Path, regularization_dir: Path, notes: Notes) -> None:
    """One folder inside the other: each image counts on one side only, and which one is said."""
    data, prior = data_dir.resolve(), regularization_dir.resolve()
    if data == prior:
        raise ConfigError.said(
            pt="a pasta de regularização é a própria pasta das imagens: cada imagem treinaria duas vezes",
            en="the regularization folder is the image folder itself: every image would train twice",
            hint_pt="escolha outra pasta, ou retire a chave",
            hint_en="choose another folder, or remove the key",
            where=shown("data", "regularization_dir"),
        )
    if data in prior.parents or prior in data.parents:
        inner = regularization_dir if data in prior.parents else data_dir
        name = printable(inner.name)
        notes.note(
            pt=f"a pasta das imagens e a de regularização estão uma dentro da outra: {name} conta só como "
            + ("regularização" if inner is regularization_dir else "imagens de treino"),
            en=f"the image folder and the regularization folder lie one inside the other: {name} counts only as "
            + ("regularization" if inner is regularization_dir else "training images"),
        )


def bucket_rule(config: DataConfig, side_multiple: int, notes: Notes) -> BucketRule:
    step = lcm(config.bucket_step, side_multiple)
    if step > min(config.resolution):
        raise ConfigError.said(
            pt=f"resolução {_sides(config.resolution)} menor que o passo dos buckets, {step}",
            en=f"resolution {_sides(config.resolution)} is below the bucket step, {step}",
            hint_pt=f"use pelo menos {step}",
            hint_en=f"use at least {step}",
            where=shown("data", "resolution"),
        )
    rule = BucketRule(config.resolution, step, config.upscale, config.buckets)
    if step != config.bucket_step:
        notes.note(
            pt=f"passo dos buckets: {step}, não {config.bucket_step}: o modelo pede múltiplos de {side_multiple}",
            en=f"bucket step: {step}, not {config.bucket_step}: the model needs multiples of {side_multiple}",
        )
    if not rule.enabled and rule.fixed != config.resolution:
        notes.note(
            pt=f"resolução {_sides(rule.fixed)} em vez de {_sides(config.resolution)}: múltiplos de {step}",
            en=f"resolution {_sides(rule.fixed)}, not {_sides(config.resolution)}: multiples of {step}",
        )
    return rule


def _used(items: list[ImageItem], rule: BucketRule, config: DataConfig, notes: Notes) -> list[ImageItem]:
    """Items with their bucket; those that cannot be used are named in `notes`."""
    used, cropped = [], []
    for item in items:
        width, height = item.facts.size
        name = f"{item.name} ({width}x{height})"
        found = fit(item.facts.size, rule)
        if min(width, height) < config.min_side:
            reason = t(pt="lado menor que", en="side below") + f" {config.min_side} ({shown('data', 'min_side')})"
            notes.exclude(reason, name)
        elif found is None:
            notes.exclude(
                t(pt="menor que qualquer bucket (dados.ampliar)", en="smaller than any bucket (data.upscale)"), name
            )
        elif item.repeats == 0:
            notes.exclude(t(pt="pasta com 0 repetições", en="folder with 0 repeats"), name)
        else:
            used.append(replace(item, fit=found))
            if found.cropped > MUCH_CROPPED:
                cropped.append(f"{item.name} ({found.cropped:.0%})")
    if cropped:
        notes.warn(
            pt=f"mais de {MUCH_CROPPED:.0%} da imagem fica fora do corte: {naming(cropped)}",
            en=f"more than {MUCH_CROPPED:.0%} of the image is cropped away: {naming(cropped)}",
        )
    return used


def matched(priors: list[ImageItem], wanted: int, notes: Notes) -> list[ImageItem]:
    """Regularization images with repeats that add up to `wanted`; the same every epoch, so all epochs are as long."""
    if not priors:
        return []
    chosen = sorted(priors, key=lambda item: stable_hash("prior", item.uid))
    for item in chosen[wanted:]:
        notes.exclude(t(pt="regularização além do necessário", en="more regularization images than needed"), item.name)
    chosen = chosen[:wanted]
    each, extra = divmod(wanted, len(chosen))
    repeated = [replace(item, repeats=each + (place < extra)) for place, item in enumerate(chosen)]
    return sorted(repeated, key=lambda item: item.name)


def _sides(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
