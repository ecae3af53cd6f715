"""Which images an optimizer step sees, and their tensors.

A `Draw` names one example of one epoch; everything random about it (noise seed, mirror, crop, caption) follows from
(run seed, image, draw), never from its place in a batch. So any step's window can be rebuilt for resume or redone in
smaller micro-batches after an OOM. Batches never mix buckets; short batches are used, not dropped, and so is an
epoch's short last window. With a single bucket, batch 4 and 4 accumulated batches of 1 see the same examples in the
same step.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..engine.tracker import host_memory
from ..modality import Batches, Draw
from ..seam.family import Batch, Example
from .dataset import Dataset
from .encode import Encoder, View, views
from .scan import ImageItem
from .variants import drawn, plain, stable_hash


class BatchPlan(Batches[Dataset]):
    def cost(self, draws: Sequence[Draw]) -> int:
        """Pixels in all."""
        width, height = self.size(draws)
        return width * height * len(draws)

    def worst_size(self) -> tuple[int, tuple[int, int]]:
        worst = self.worst()
        return len(worst), self.size(worst)

    def size(self, draws: Sequence[Draw]) -> tuple[int, int]:
        """(width, height) of a micro-batch's images."""
        return _target(self.dataset.examples[draws[0].item])

    def split(self, draws: list[Draw], rows: int) -> list[list[Draw]]:
        return [draws[at : at + rows] for at in range(0, len(draws), rows)]

    def _make_windows(self, epoch: int) -> list[list[list[Draw]]]:
        batches = self._make_batches(epoch)
        return [batches[at : at + self.accumulation] for at in range(0, len(batches), self.accumulation)]

    def _make_batches(self, epoch: int) -> list[list[Draw]]:
        """Every draw gets a random key. Batches are cut from each bucket in key order and lined up by their middle
        key: a small bucket's batches then fall anywhere in the epoch, and a single bucket's stay in order."""
        buckets: dict[tuple[int, int], list[tuple[int, Draw]]] = {}
        for index, item in enumerate(self.dataset.examples):
            for occurrence in range(item.repeats):
                key = stable_hash("order", self.seed, epoch, item.uid, occurrence)
                buckets.setdefault(_target(item), []).append((key, Draw(index, epoch, occurrence)))
        batches = []
        for keyed in buckets.values():
            keyed.sort(key=lambda pair: (pair[0], pair[1].item, pair[1].occurrence))
            for start in range(0, len(keyed), self.batch_size):
                batch = keyed[start : start + self.batch_size]
                batches.append((batch[len(batch) // 2][0], [draw for _, draw in batch]))
        batches.sort(key=lambda pair: (pair[0], pair[1][0].item))
        return [draws for _, draws in batches]


class ImageLoader:
    """Turns draws into batches of cached tensors; keeps the most recently used ones in RAM, up to `ram_bytes`."""

    def __init__(self, dataset: Dataset, encoder: Encoder, seed: int, ram_bytes: int = 512 * 2**20) -> None:
        self.dataset, self.encoder, self.seed, self.ram_bytes = dataset, encoder, seed, ram_bytes
        self._recent: OrderedDict[tuple[object, ...], Example] = OrderedDict()
        self._held_bytes = 0

    def load_batch(self, draws: Sequence[Draw]) -> Batch:
        config = self.dataset.config
        items = [self.dataset.examples[draw.item] for draw in draws]
        examples, captions, seeds = [], [], []
        for item, draw in zip(items, draws, strict=True):
            number = draw.epoch * item.repeats + draw.occurrence
            choices = views(item, config)
            view = choices[stable_hash("view", self.seed, item.uid, number) % len(choices)]
            examples.append(self._image(item, view))
            captions.append(
                drawn(item.caption.texts, config, self.seed, number, item.uid, cached=self.encoder.cache_text)
            )
            seeds.append(stable_hash("noise", self.seed, draw.epoch, item.uid, draw.occurrence) >> 1)
        weights = [config.prior_weight if item.regularization else 1.0 for item in items]
        return self._batch(examples, captions, seeds, weights)

    def validation_batches(self, batch_size: int = 1) -> Iterator[Batch]:
        """The held-out images: centre crop, plain caption, and noise that never changes."""
        buckets: dict[tuple[int, int], list[ImageItem]] = {}
        for item in self.dataset.validation:
            buckets.setdefault(_target(item), []).append(item)
        for items in buckets.values():
            for start in range(0, len(items), batch_size):
                chosen = items[start : start + batch_size]
                captions = [plain(item.caption.texts[0], self.dataset.config) for item in chosen]
                seeds = [stable_hash("validation", item.facts.content) >> 1 for item in chosen]
                yield self._batch([self._image(i, View()) for i in chosen], captions, seeds, [1.0] * len(chosen))

    def _batch(self, examples: list[Example], captions: list[str], seeds: list[int], weights: list[float]) -> Batch:
        with host_memory():
            texts = self._texts(captions)
            together = [{**image, **text} for image, text in zip(examples, texts, strict=True)]
            batch = collate(together, self.encoder.family)
            batch["seeds"] = torch.tensor(seeds, dtype=torch.int64)
            batch["weight"] = torch.tensor(weights, dtype=torch.float32)
        return batch

    def _texts(self, captions: list[str]) -> list[Example]:
        if not self.encoder.cache_text:
            return self.encoder.family.tokenize(captions)
        return [self._recall(("text", c), functools.partial(self.encoder.read_text, c)) for c in captions]

    def _image(self, item: ImageItem, view: View) -> Example:
        return self._recall(("image", item.uid, view), functools.partial(self.encoder.read_image, item, view))

    def _recall(self, key: tuple[object, ...], read: "functools.partial[Example]") -> Example:
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key]
        with host_memory():
            example = self._recent[key] = read()
        self._held_bytes += _bytes(example)
        while self._held_bytes > self.ram_bytes and len(self._recent) > 1:
            _, old = self._recent.popitem(last=False)
            self._held_bytes -= _bytes(old)
        return example


def collate(examples: list[Example], family: object) -> Batch:
    """Stack; a family whose parts differ in length (padded text) brings its own `collate`."""
    shapes = [{name: tensor.shape for name, tensor in example.items()} for example in examples]
    own = getattr(family, "collate", None)
    if own is not None and any(shape != shapes[0] for shape in shapes):
        batch: Batch = own(examples)
        return batch
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def _bytes(example: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in example.values())


def _target(item: ImageItem) -> tuple[int, int]:
    assert item.fit is not None
    return item.fit.target
