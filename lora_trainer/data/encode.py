"""The caching phase: every image view and caption text a run can ask for, encoded once and kept on disk.

The VAE is loaded only if an image entry is missing, the text encoders only if a text is; never both at once.
Everything is encoded one by one: the smallest peak, and an entry's bits then do not depend on which others were
missing with it, so an interrupted and resumed caching phase gives the same bits as a straight one. When memory runs out,
the network is dropped, loaded anew one rung down (planner/caching.py), and the same entry made again; what is written stays.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from ..config.schema import DataConfig
from ..engine.vae_tiling import tiled, tiles_change
from ..errors import ConfigError, DataError, t
from ..machine.hardware import PartRow
from ..modality import Progress, no_progress
from ..planner.caching import Encoding, OnOom, unheard
from ..runtime.recover import free_memory
from ..seam.family import Example, Framing, ImageFamily
from ._work import Work, load_text_encoders, load_vae, place
from .cache import Cache, cache_key
from .dataset import Dataset
from .images import BadImage, background_colour, load, load_grey
from .scan import ImageItem
from .variants import all_variants, plain, stable_hash

_VERSION = 1
"""Raised when the way images are prepared changes."""


@dataclass(frozen=True)
class View:
    """One crop of an image, mirrored or not. `place` in [0, 1]²: where the crop sits."""

    place: tuple[float, float] = (0.5, 0.5)
    flip: bool = False


def views(item: ImageItem, config: DataConfig) -> list[View]:
    """All views of an image that training may draw. They ignore the seed, so that a new seed finds the cache full."""
    assert item.fit is not None
    places = [(0.5, 0.5)]
    if config.crop == "random" and item.fit.slack != (0, 0):
        numbers = [stable_hash("crop", item.facts.content, i) for i in range(config.crop_variants)]
        places = [((n >> 32) / 2**32, (n & 0xFFFFFFFF) / 2**32) for n in numbers]
    return [View(place, flip) for place in places for flip in ((False, True) if config.flip else (False,))]


def caches_text(choice: str, train_text_encoder: bool) -> bool:
    """`dados.cache_codificador_texto` -> whether captions are encoded ahead."""
    if choice == "yes" and train_text_encoder:
        raise ConfigError.said(
            pt="dados.cache_codificador_texto: sim não combina com modelo.treinar_codificador_texto: sim",
            en="data.cache_text_encoder: yes excludes model.train_text_encoder: yes",
            hint_pt="um codificador em treino muda a cada passo; use cache_codificador_texto: auto",
            hint_en="an encoder in training changes with every step; use cache_text_encoder: auto",
        )
    return choice != "no" and not train_text_encoder


@dataclass
class Encoder:
    """Knows every entry's key, reads entries, and makes them. `dtype`s are those the VAE and encoders run in.

    `encoding` moves down a rung when memory runs out; `parts` are the networks that were loaded, as they really were.
    """

    family: ImageFamily
    cache: Cache
    config: DataConfig
    image_dtype: torch.dtype
    text_dtype: torch.dtype
    cache_text: bool = True
    encoding: Encoding = field(default_factory=Encoding)
    parts: list[PartRow] = field(default_factory=list)

    @cached_property
    def _image_part(self) -> tuple[object, ...]:
        background = background_colour(self.config.background)
        dtype = str(self.family.vae_dtype(self.image_dtype))
        return _VERSION, self.family.image_fingerprint(), dtype, background, self.config.mask

    @cached_property
    def _text_part(self) -> tuple[object, ...]:
        quantization = self.encoding.text_quantization
        changed = () if quantization == "no" else (quantization,)
        return _VERSION, self.family.text_fingerprint(), str(self.text_dtype), *changed

    def image_key(self, item: ImageItem, view: View) -> str:
        """Of the entry that would be made now."""
        return self._image_key(item, view, self.encoding.vae_tiling)

    def image_keys(self, item: ImageItem, view: View) -> list[str]:
        """Of all entries that will do, the best first."""
        if not self.encoding.mixed:
            return [self.image_key(item, view)]
        return list(dict.fromkeys(self._image_key(item, view, tiles) for tiles in (False, True)))

    def _image_key(self, item: ImageItem, view: View, tiles: bool) -> str:
        assert item.fit is not None
        framing = item.fit.framing(view.place, view.flip)
        mask = item.mask.content if item.mask else ""
        sizes = (framing.original, item.fit.resized, framing.crop, framing.target, view.flip)
        changed = ("tiled",) if tiles and tiles_change(framing.target) else ()
        return cache_key("image", *self._image_part, item.facts.content, mask, sizes, *changed)

    def text_key(self, caption: str) -> str:
        return cache_key("text", *self._text_part, caption)

    def has_image(self, item: ImageItem, view: View) -> bool:
        return any(self.cache.has(key) for key in self.image_keys(item, view))

    def read_image(self, item: ImageItem, view: View) -> Example:
        return self._read(self.image_keys(item, view), item.name)

    def read_text(self, caption: str) -> Example:
        return self._read([self.text_key(caption)], repr(caption))

    def _read(self, keys: list[str], name: str) -> Example:
        for key in keys:
            if (example := self.cache.read(key)) is not None:
                return example
        raise DataError(
            t(pt=f"entrada do cache ausente ou danificada: {name}", en=f"missing or damaged cache entry: {name}"),
            hint=t(pt="rode de novo: ela será refeita", en="run again: it will be made again"),
            where=str(self.cache.path(keys[-1])),
        )

    def pixels(self, item: ImageItem, view: View) -> tuple[Tensor, Tensor | None]:
        """Pixels (1, 3, H, W) in [-1, 1] and, when masks are on, the mask (1, 1, H, W) in [0, 1]."""
        assert item.fit is not None
        box = item.fit.box(view.place)
        try:
            rgb, alpha = load(item.path, item.fit, box, background_colour(self.config.background))
            if self.config.mask == "files":
                alpha = load_grey(item.mask.path, item.fit.target, box) if item.mask else None
        except BadImage as error:  # good when it was checked, changed since
            raise DataError(f"{item.name}: {error}") from error
        pixels = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[None].float() / 127.5 - 1
        mask = None
        if self.config.mask != "no":
            mask = torch.ones(1, 1, *pixels.shape[2:])
            if alpha is not None and not item.regularization:
                mask = torch.from_numpy(np.array(alpha))[None, None].float() / 255
        if view.flip:
            return pixels.flip(-1), mask.flip(-1) if mask is not None else None
        return pixels, mask


@dataclass(frozen=True)
class EncodeCounts:
    """How many entries the run needs, and how many of them had to be made."""

    images: int
    images_made: int
    texts: int
    texts_made: int


def image_entries(dataset: Dataset) -> list[tuple[ImageItem, View]]:
    entries = [(item, view) for item in dataset.examples for view in views(item, dataset.config)]
    return entries + [(item, View()) for item in dataset.validation]


def text_entries(dataset: Dataset) -> list[str]:
    texts = [t for item in dataset.examples for t in all_variants(item.caption.texts, dataset.config, item.uid)]
    texts += [plain(item.caption.texts[0], dataset.config) for item in dataset.validation]
    return list(dict.fromkeys(texts))


def encode_dataset(
    dataset: Dataset,
    encoder: Encoder,
    device: torch.device,
    extra_captions: Sequence[str] = (),
    progress: Progress = no_progress,
    on_oom: OnOom = unheard,
) -> EncodeCounts:
    """Make every missing entry. `extra_captions` (preview prompts) are encoded even when captions are not cached.

    Raises DoesNotFitError when there is not enough memory on any rung.
    """
    images = {encoder.image_key(item, view): (item, view) for item, view in image_entries(dataset)}
    captions = [*(text_entries(dataset) if encoder.cache_text else []), *extra_captions]
    texts = {encoder.text_key(caption): caption for caption in captions}
    missing_texts = {key: caption for key, caption in texts.items() if not encoder.cache.has(key)}
    missing_images = [entry for entry in images.values() if not encoder.has_image(*entry)]
    if missing_texts:
        _encode_texts(missing_texts, encoder, device, progress, on_oom)
        free_memory(device)
    if missing_images:
        _encode_images(missing_images, encoder, device, progress, on_oom)
        free_memory(device)
    return EncodeCounts(len(images), len(missing_images), len(texts), len(missing_texts))


@torch.no_grad()
def _encode_texts(
    missing: dict[str, str], encoder: Encoder, device: torch.device, progress: Progress, on_oom: OnOom
) -> None:
    def encode(encoders: nn.ModuleDict, caption: str) -> Example:
        with place(encoder.encoding.text_on_cpu):
            return encoder.family.encode_text(encoders, [caption])[0]

    work = Work("text_cache", device, lambda: load_text_encoders(encoder, device), encode, encoder, on_oom)
    for done, (key, caption) in enumerate(missing.items(), 1):
        encoder.cache.write(key, work.do(caption))
        progress("texts", done, len(missing))


@torch.no_grad()
def _encode_images(
    missing: list[tuple[ImageItem, View]], encoder: Encoder, device: torch.device, progress: Progress, on_oom: OnOom
) -> None:
    def encode(vae: nn.Module, prepared: "Prepared") -> Example:
        encoding = encoder.encoding
        with place(encoding.images_on_cpu), tiled(vae, encoding.vae_tiling):
            pixels = prepared.pixels.to("cpu" if encoding.images_on_cpu else device)
            return encoder.family.encode_image(vae, pixels, [prepared.framing])[0]

    work = Work("latent_cache", device, lambda: load_vae(encoder, device), encode, encoder, on_oom)
    with closing(_prepared(missing, encoder)) as images:
        for done, image in enumerate(images, 1):
            if not (encoder.encoding.mixed and encoder.has_image(image.item, image.view)):
                example = work.do(image)
                if image.mask is not None:
                    height, width = example["latents"].shape[-2:]
                    example = {**example, "mask": adaptive_avg_pool2d(image.mask, (height, width))[0]}
                encoder.cache.write(encoder.image_key(image.item, image.view), example)
            progress("images", done, len(missing))


@dataclass(frozen=True)
class Prepared:
    """An image read and fitted: pixels (1, 3, H, W) in [-1, 1], mask (1, 1, H, W) in [0, 1]."""

    item: ImageItem
    view: View
    pixels: Tensor
    mask: Tensor | None

    @property
    def framing(self) -> Framing:
        assert self.item.fit is not None
        return self.item.fit.framing(self.view.place, self.view.flip)


def _prepared(missing: list[tuple[ImageItem, View]], encoder: Encoder) -> Generator[Prepared, None, None]:
    """Reads the next image while the card encodes this one; two pictures are held at most."""
    with ThreadPoolExecutor(1) as worker:
        ahead = worker.submit(encoder.pixels, *missing[0])
        for entry, following in zip(missing, [*missing[1:], None], strict=True):
            ready = ahead.result()
            if following is not None:
                ahead = worker.submit(encoder.pixels, *following)
            yield Prepared(*entry, *ready)
