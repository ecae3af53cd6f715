"""Which examples an optimizer step sees, and their tensors, as a pure function of the step.

A row of a batch is one example, or several packed one behind the other. `segment_ids` tell them apart (1, 2, … and 0
for padding; attention must not cross them), positions restart in each, and the first token of each is no target, so a
packed example costs and teaches what it would alone. A `TextDraw` knows its row: a micro-batch may be split anywhere
between draws, and every row is rebuilt from what is left of it. Windows depend on batch × accumulation only, so
batch 4 and 4 accumulated batches of 1 see the same examples in the same step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..data.variants import stable_hash
from ..engine.tracker import host_memory
from ..modality import Batches, Draw
from ..seam.family import Batch
from .dataset import TextDataset
from .pack import plan_groups, plan_packs
from .tokens import IGNORED, Tokenised

MULTIPLE = 8
"""Row lengths are rounded up to this, which matrix kernels like."""


@dataclass(frozen=True)
class TextDraw(Draw):
    """`item` indexes `TextDataset.examples`; draws of one batch with the same `row` are packed together."""

    row: int = 0


class TextBatchPlan(Batches[TextDataset]):
    def __init__(self, dataset: TextDataset, batch_size: int, accumulation: int, seed: int) -> None:
        self._items = [i for i in range(len(dataset.examples)) for _ in range(dataset.repeats)]
        self._lengths = [len(dataset.examples[i]) for i in self._items]
        self._uids = [f"{dataset.examples[i].uid} {n % dataset.repeats}" for n, i in enumerate(self._items)]
        super().__init__(dataset, batch_size, accumulation, seed)
        self.rows_per_epoch = sum(len(by_row(draws)) for draws in self.first_epoch())

    @property
    def longest(self) -> int:
        """Tokens of the longest row that any batch can have: what memory must be planned for."""
        most = min(sum(self._lengths), self.dataset.max_length)
        longest = most if self.dataset.packing else max(self._lengths)
        return padded(longest)

    def cost(self, draws: Sequence[Draw]) -> int:
        """Tokens in all, padding included."""
        length, rows = self.size(draws)
        return length * rows

    def worst_size(self) -> tuple[int, tuple[int, int]]:
        return max(self.size(draws)[1] for draws in self.first_epoch()), (self.longest, 1)

    def split(self, draws: list[Draw], rows: int) -> list[list[Draw]]:
        found = by_row(draws)
        return [[d for row in found[at : at + rows] for d in row] for at in range(0, len(found), rows)]

    def size(self, draws: Sequence[Draw]) -> tuple[int, int]:
        """(tokens, rows) of a micro-batch."""
        rows = by_row(draws)
        return padded(max(sum(len(self.dataset.examples[d.item]) for d in row) for row in rows)), len(rows)

    def _make_windows(self, epoch: int) -> list[list[list[Draw]]]:
        size = self.batch_size * self.accumulation
        if self.dataset.packing:
            packs = plan_packs(self._lengths, self.dataset.max_length, self.seed, epoch, self._uids)
            windows = [packs[start : start + size] for start in range(0, len(packs), size)]
        else:
            groups = plan_groups(self._lengths, size, self.seed, epoch, self._uids)
            windows = [[[index] for index in group] for group in groups]
        rows = iter(range(len(self._items)))
        return [self._micro_batches([(next(rows), row) for row in window], epoch) for window in windows]

    def _micro_batches(self, window: list[tuple[int, list[int]]], epoch: int) -> list[list[Draw]]:
        batches: list[list[Draw]] = []
        for start in range(0, len(window), self.batch_size):
            part = window[start : start + self.batch_size]
            batches.append([self._draw(index, epoch, row) for row, indices in part for index in indices])
        return batches

    def _draw(self, index: int, epoch: int, row: int) -> TextDraw:
        return TextDraw(self._items[index], epoch, index % self.dataset.repeats, row)


class TextLoader:
    """Turns draws into batches."""

    def __init__(self, dataset: TextDataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def load_batch(self, draws: Sequence[Draw]) -> Batch:
        rows = by_row(draws)
        examples = [[self.dataset.examples[draw.item] for draw in row] for row in rows]
        seeds = [
            stable_hash("noise", self.seed, row[0].epoch, self.dataset.examples[row[0].item].uid, row[0].occurrence) >> 1
            for row in rows
        ]
        return collate(examples, seeds, self.dataset.pad_id)

    def validation_batches(self, batch_size: int = 1) -> Iterator[Batch]:
        """The held-out examples, unpacked, the longest first."""
        items = sorted(self.dataset.validation, key=lambda item: (-len(item), item.uid))
        for start in range(0, len(items), batch_size):
            chosen = items[start : start + batch_size]
            seeds = [stable_hash("validation", item.uid) >> 1 for item in chosen]
            yield collate([[item] for item in chosen], seeds, self.dataset.pad_id)


def by_row(draws: Sequence[Draw]) -> list[list[Draw]]:
    rows: dict[int, list[Draw]] = {}
    for draw in draws:
        assert isinstance(draw, TextDraw)
        rows.setdefault(draw.row, []).append(draw)
    return list(rows.values())


def padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def collate(rows: Sequence[Sequence[Tokenised]], seeds: Sequence[int], pad_id: int) -> Batch:
    """input_ids, labels, position_ids, segment_ids, attention_mask (B, L) int64; seeds (B,); weight (B,).

    Padding is its own segment 0 with positions of its own, so no attention row is ever empty.
    """
    length = padded(max(sum(map(len, row)) for row in rows))
    shape = (len(rows), length)
    ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORED, np.int64)
    positions, segments = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for r, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row, 1):
            end = start + len(example)
            ids[r, start:end], labels[r, start:end] = example.input_ids, example.labels
            positions[r, start:end], segments[r, start:end] = np.arange(len(example)), number
            start = end
        positions[r, start:] = np.arange(length - start)
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments}
    with host_memory():
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        tensors["attention_mask"] = (tensors["segment_ids"] > 0).long()
        tensors["seeds"] = torch.tensor(list(seeds), dtype=torch.int64)
        tensors["weight"] = torch.ones(len(rows), dtype=torch.float32)
    return tensors
