"""Packs and groups as pure functions of the step: each example once an epoch, nothing shared between packed ones but
the row, any batch division the same examples (the data side of cases C07 and H01)."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from text_cases import QWEN2, chat, dataset, made, tokenizer, write_jsonl
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from lora_trainer.text.batches import TextBatchPlan, TextDraw, TextLoader, collate
from lora_trainer.text.dataset import TextDataset
from lora_trainer.text.pack import plan_groups, plan_packs, rounded
from lora_trainer.text.tokens import Counts

LENGTHS = [(i * 37) % 250 + 3 for i in range(400)]


@pytest.fixture
def data(tmp_path: Path) -> TextDataset:
    rows = [chat(f"pergunta {i} " * (i % 7 + 1), f"resposta {i} " * (i % 5 + 1)) for i in range(40)]
    return dataset(write_jsonl(tmp_path / "d.jsonl", rows), tokenizer(QWEN2), max_length=256)


def unpacked(data: TextDataset, **options: Any) -> TextDataset:
    config = data.config.model_copy(update={"packing": "no", **options})
    return TextDataset(config, data.examples, data.validation, data.template, data.collected, data.counts, data.pad_id)


# -- packs


def test_every_example_is_packed_once_and_no_row_is_too_long() -> None:
    packs = plan_packs(LENGTHS, 256, seed=1, epoch=0)
    assert sorted(i for pack in packs for i in pack) == list(range(400))
    assert max(sum(LENGTHS[i] for i in pack) for pack in packs) <= 256
    assert sum(LENGTHS) / (len(packs) * 256) > 0.93


def test_packs_are_a_function_of_seed_and_epoch_and_their_number_is_constant() -> None:
    plans = [plan_packs(LENGTHS, 256, seed, epoch) for seed, epoch in [(1, 0), (1, 0), (1, 1), (2, 0)]]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2] != plans[3] != plans[0]
    assert len({len(plan) for plan in plans}) == 1
    partners = [{tuple(sorted(pack)) for pack in plan} for plan in plans]
    assert len(partners[0] & partners[2]) < len(partners[0]) / 2  # examples meet others from epoch to epoch


def test_packs_follow_the_examples_not_their_order_in_the_file() -> None:
    uids = [f"u{i}" for i in range(400)]
    straight = plan_packs(LENGTHS, 256, 1, 0, uids)
    turned = plan_packs(LENGTHS[::-1], 256, 1, 0, uids[::-1])
    assert [[uids[i] for i in pack] for pack in straight] == [[uids[::-1][i] for i in pack] for pack in turned]


def test_edges_of_packing() -> None:
    assert plan_packs([], 8, 0, 0) == []
    assert plan_packs([8], 8, 0, 0) == [[0]]
    assert sorted(map(len, plan_packs([8, 8, 4, 4], 8, 0, 0))) == [1, 1, 2]
    assert all(length <= rounded(length) <= length * 1.032 for length in range(1, 5000))


def test_groups_are_alike_in_length_and_depend_on_the_window_alone() -> None:
    windows = plan_groups(LENGTHS, 8, 1, 0)
    assert sorted(i for window in windows for i in window) == list(range(400))
    padded = sum(max(LENGTHS[i] for i in window) * len(window) for window in windows)
    shuffled = [list(range(400))[start : start + 8] for start in range(0, 400, 8)]
    naive = sum(max(LENGTHS[i] for i in window) * len(window) for window in shuffled)
    assert padded < 1.15 * sum(LENGTHS) < naive
    assert plan_groups(LENGTHS, 8, 1, 1) != windows == plan_groups(LENGTHS, 8, 1, 0)


# -- the plan


@pytest.mark.parametrize("packing", [True, False])
def test_windows_see_every_example_once_an_epoch(data: TextDataset, packing: bool) -> None:
    plan = TextBatchPlan(data if packing else unpacked(data), 2, 2, seed=3)
    for epoch in range(3):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        draws = [draw for step in steps for batch in plan.window(step) for draw in batch]
        assert Counter(draw.item for draw in draws) == Counter(range(40))
        assert {draw.epoch for draw in draws} == {epoch} == {plan.epoch(step) for step in steps}
        assert all(1 <= len(plan.window(step)) <= 2 for step in steps)
    assert plan.window(1) == TextBatchPlan(plan.dataset, 2, 2, seed=3).window(1)
    assert plan.window(1) != TextBatchPlan(plan.dataset, 2, 2, seed=4).window(1)


@pytest.mark.parametrize("packing", [True, False])
def test_batch_4_and_4_batches_of_1_see_the_same_rows(data: TextDataset, packing: bool) -> None:
    """And their tensors hold the same targets and seeds: the loss of a window cannot depend on the division (H01)."""
    data = data if packing else unpacked(data)
    plans = [TextBatchPlan(data, batch, accumulation, seed=3) for batch, accumulation in [(4, 1), (2, 2), (1, 4)]]
    assert len({plan.steps_per_epoch for plan in plans}) == 1
    loader = TextLoader(data, seed=3)
    for step in range(2 * plans[0].steps_per_epoch):
        windows = [[loader.load_batch(draws) for draws in plan.window(step)] for plan in plans]
        rows = [[row for batch in window for row in tokens(batch)] for window in windows]
        assert rows[0] == rows[1] == rows[2]
        seeds = [torch.cat([batch["seeds"] for batch in window]).tolist() for window in windows]
        assert seeds[0] == seeds[1] == seeds[2]
        assert len(set(seeds[0])) == len(seeds[0])


def tokens(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    keep = batch["attention_mask"].bool()
    return [
        (ids[mask].tolist(), labels[mask].tolist())
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], keep, strict=True)
    ]


def test_a_micro_batch_may_be_split_anywhere(data: TextDataset) -> None:
    plan, loader = TextBatchPlan(data, 2, 1, seed=3), TextLoader(data, seed=3)
    draws = plan.window(0)[0]
    whole = loader.load_batch(draws)
    for cut in range(1, len(draws)):
        halves = [loader.load_batch(draws[:cut]), loader.load_batch(draws[cut:])]
        for name in ("input_ids", "labels"):
            split = torch.cat([half[name][half["attention_mask"].bool()] for half in halves])
            assert split.tolist() == whole[name][whole["attention_mask"].bool()].tolist()


def test_repeats(data: TextDataset) -> None:
    plan = TextBatchPlan(unpacked(data, repeats=3), 4, 1, seed=3)
    draws = [draw for step in range(plan.steps_per_epoch) for batch in plan.window(step) for draw in batch]
    assert Counter((draw.item, draw.occurrence) for draw in draws) == Counter((i, o) for i in range(40) for o in range(3))
    seeds = [TextLoader(data, 3).load_batch([draw])["seeds"].item() for draw in draws]
    assert len(set(seeds)) == 120


@pytest.mark.parametrize("packing", [True, False])
def test_what_memory_is_planned_for_bounds_every_batch(data: TextDataset, packing: bool) -> None:
    plan = TextBatchPlan(data if packing else unpacked(data), 2, 2, seed=3)
    loader = TextLoader(plan.dataset, 3)
    batches = [draws for step in range(3 * plan.steps_per_epoch) for draws in plan.window(step)]
    shapes = [tuple(loader.load_batch(draws)["input_ids"].shape) for draws in batches]
    assert [plan.size(draws) for draws in batches] == [(length, rows) for rows, length in shapes]
    assert max(length for _, length in shapes) <= plan.longest <= 256
    epoch = shapes[: sum(len(plan.window(step)) for step in range(plan.steps_per_epoch))]
    assert plan.cost(plan.worst()) == max(rows * length for rows, length in epoch)


# -- tensors


def test_a_packed_row() -> None:
    batch = collate([made([3, 5]), made([2])], [7, 8], pad_id=9)
    assert batch["input_ids"].tolist() == [
        [1000, 1001, 1002, 2000, 2001, 2002, 2003, 2004],
        [1000, 1001, 9, 9, 9, 9, 9, 9],
    ]
    assert batch["labels"].tolist() == [
        [-100, 1001, 1002, -100, 2001, 2002, 2003, 2004],
        [-100, 1001, -100, -100, -100, -100, -100, -100],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 8, [1, 1, 0, 0, 0, 0, 0, 0]]
    assert batch["seeds"].tolist() == [7, 8]
    assert batch["weight"].tolist() == [1.0, 1.0]
    integers = {name: tensor.dtype for name, tensor in batch.items() if name != "weight"}
    assert set(integers.values()) == {torch.int64}


def test_packed_equals_alone_in_tokens_labels_and_positions(data: TextDataset) -> None:
    """B's inputs do not change with what it is packed after (C07); the number of targets is the same too."""
    loader = TextLoader(data, 3)
    plan = TextBatchPlan(data, 1, 1, seed=3)
    packed = max((plan.window(step)[0] for step in range(plan.steps_per_epoch)), key=len)
    assert len(packed) > 2
    together = loader.load_batch(packed)
    for number, draw in enumerate(packed, 1):
        alone = loader.load_batch([draw])
        inside = together["segment_ids"][0] == number
        for name in ("input_ids", "labels", "position_ids"):
            assert together[name][0][inside].tolist() == alone[name][0][alone["attention_mask"][0].bool()].tolist()
    assert (together["labels"] != -100).sum() == sum(data.examples[d.item].targets for d in packed)


def test_a_real_model_sees_packed_and_unpacked_alike(data: TextDataset) -> None:
    """Llama under the mask that `segment_ids` stand for: the summed loss of a window is the same packed, unpacked and
    in any division (C07, H01), and padding is never a target."""
    torch.manual_seed(0)
    vocabulary = 1 + max(int(e.input_ids.max()) for e in data.examples)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, initializer_range=0.3, **sizes)).eval()
    draws = TextBatchPlan(data, 1, 1, seed=3).window(0)[0]
    loader = TextLoader(data, 3)
    packed = loss(model, loader.load_batch(draws))
    apart = [replace(draw, row=place) for place, draw in enumerate(draws) if isinstance(draw, TextDraw)]
    whole = loss(model, loader.load_batch(apart))
    pieces = [loss(model, loader.load_batch([draw])) for draw in draws]
    assert packed[1] == whole[1] == sum(count for _, count in pieces) > 20
    assert whole[0] == pytest.approx(packed[0], rel=1e-5)
    assert sum(value for value, _ in pieces) == pytest.approx(packed[0], rel=1e-5)
    blind = loss(model, {**loader.load_batch(draws), "segment_ids": torch.ones(1, 256, dtype=torch.int64)})
    assert abs(blind[0] - packed[0]) > 1e-3 * packed[0]  # without the mask they do see each other


@torch.no_grad()
def loss(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """(summed loss, targets)"""
    segments, length = batch["segment_ids"][:, : batch["labels"].shape[1]], batch["labels"].shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = causal & (segments[:, :, None] == segments[:, None, :])
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
    logits = model(batch["input_ids"], attention_mask=additive, position_ids=batch["position_ids"]).logits
    targets = batch["labels"][:, 1:]
    value = cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="sum")
    return float(value), int((targets != -100).sum())


def test_lengths_are_padded_to_a_multiple_of_8() -> None:
    assert [collate([made([n])], [0], 0)["labels"].shape[1] for n in (2, 8, 9, 17)] == [8, 8, 16, 24]


def test_validation_batches_are_fixed_and_whole(data: TextDataset) -> None:
    held = TextDataset(data.config, (), data.examples, data.template, data.collected, Counts(), 0)
    batches = [list(TextLoader(held, seed).validation_batches(8)) for seed in (1, 2)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*batches, strict=True) for name in a)
    assert sum(len(batch["seeds"]) for batch in batches[0]) == 40
    assert all(batch["segment_ids"].max() == 1 for batch in batches[0])


def test_draws_name_their_row() -> None:
    assert TextDraw(1, 0, 0, 2) == TextDraw(1, 0, 0, row=2) != TextDraw(1, 0, 0, 3)
