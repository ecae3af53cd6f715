"""The order of a run and its batches. Cases A06, H03 (step counts), H06 of the bug reports."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from data_cases import TinyFamily, built, cap, good, img

from lora_trainer.data import batches
from lora_trainer.data.batches import BatchPlan, ImageLoader, collate
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Encoder, encode_dataset

CPU = torch.device("cpu")


def mixed(folder):
    """Five squares, one upright, one lying: case A06."""
    for i, (w, h) in enumerate([(128, 128)] * 5 + [(128, 192), (192, 128)]):
        img(folder / f"{i}.png", w, h)
        cap(folder / f"{i}.txt", f"ohwx {i}")
    return folder


def loaded(dataset, folder, seed=0, **options):
    encoder = Encoder(TinyFamily(), Cache(folder), dataset.config, torch.float32, torch.float32, **options)
    encode_dataset(dataset, encoder, CPU)
    return ImageLoader(dataset, encoder, seed)


def seen(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return [draw for step in steps for batch in plan.window(step) for draw in batch]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
@pytest.mark.parametrize("accumulation", [1, 3, 100])
def test_every_repeat_of_every_image_is_seen_once_an_epoch(tmp_path, batch_size, accumulation):
    dataset = built(mixed(tmp_path / "ds"), resolution=192, repeats=2)
    plan = BatchPlan(dataset, batch_size, accumulation, seed=1)
    assert plan.steps_per_epoch >= 1
    for epoch in range(3):
        assert Counter((d.item, d.occurrence) for d in seen(plan, epoch)) == Counter(
            (i, o) for i in range(7) for o in (0, 1)
        )
        assert all(draw.epoch == epoch for draw in seen(plan, epoch))


def test_batches_never_mix_buckets_and_are_shuffled(tmp_path):
    dataset = built(mixed(tmp_path / "ds"), resolution=192, repeats=4)
    plan = BatchPlan(dataset, 3, 2, seed=1)
    for step in range(2 * plan.steps_per_epoch):
        for batch in plan.window(step):
            assert len({dataset.examples[draw.item].fit.target for draw in batch}) == 1
    orders = [[(d.item, d.occurrence) for d in seen(plan, epoch)] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_step_counts_of_h03(tmp_path):
    dataset = built(good(tmp_path / "ds", 12), resolution=256, repeats=2)
    plan = BatchPlan(dataset, 2, 3, seed=0)
    assert (plan.batches_per_epoch, plan.steps_per_epoch) == (12, 4)
    assert [len(plan.window(step)) for step in range(20)] == [3] * 20
    assert BatchPlan(dataset, 6, 1, seed=0).steps_per_epoch == 4


def test_the_short_last_window_is_there(tmp_path):
    plan = BatchPlan(built(good(tmp_path / "ds", 5)), 1, 2, seed=0)
    assert [len(plan.window(step)) for step in range(6)] == [2, 2, 1, 2, 2, 1]


def test_any_step_can_be_rebuilt_alone(tmp_path):
    dataset = built(mixed(tmp_path / "ds"), resolution=192, repeats=3)
    straight = BatchPlan(dataset, 2, 2, seed=5)
    windows = [straight.window(step) for step in range(40)]
    for step in (39, 3, 17, 0):
        assert BatchPlan(dataset, 2, 2, seed=5).window(step) == windows[step]
    assert [BatchPlan(dataset, 2, 2, seed=6).window(s) for s in range(5)] != windows[:5]


def test_batch_4_is_4_batches_of_1(tmp_path):
    """With one bucket the windows hold the same examples with the same tensors, noise seeds and captions."""
    dataset = built(good(tmp_path / "ds", 10), resolution=64, flip=True, shuffle_captions=True, caption_dropout=0.3)
    loader = loaded(dataset, tmp_path / "store")
    wide, narrow = BatchPlan(dataset, 4, 1, seed=3), BatchPlan(dataset, 1, 4, seed=3)
    assert wide.steps_per_epoch == narrow.steps_per_epoch == 3
    for step in range(6):
        (one,) = [loader.load_batch(draws) for draws in wide.window(step)]
        many = [loader.load_batch(draws) for draws in narrow.window(step)]
        for name, tensor in one.items():
            assert torch.equal(tensor, torch.cat([batch[name] for batch in many])), name


def test_batch_contents(tmp_path):
    ds = good(tmp_path / "ds", 2)
    img(tmp_path / "reg/1_gato/r.png")
    dataset = built(ds, resolution=128, regularization_dir=str(tmp_path / "reg"), prior_weight=0.5, mask="alpha")
    loader = loaded(dataset, tmp_path / "store")
    (draws,) = BatchPlan(dataset, 4, 1, seed=0).window(0)
    batch = loader.load_batch(draws)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "latents": (4, 4, 16, 16), "time_ids": (4, 6), "mask": (4, 1, 16, 16), "prompt_embeds": (4, 77, 16),
        "seeds": (4,), "weight": (4,),
    }  # fmt: skip
    assert batch["seeds"].dtype == torch.int64
    assert batch["weight"].dtype == torch.float32
    assert sorted(batch["weight"].tolist()) == [0.5, 0.5, 1, 1]
    assert len(set(batch["seeds"].tolist())) == 4, "repeats of one image get their own noise"
    assert (batch["seeds"] >= 0).all()


def test_noise_differs_by_epoch_and_seed_only(tmp_path):
    dataset = built(good(tmp_path / "ds", 3), resolution=64)
    store = tmp_path / "store"
    plan = BatchPlan(dataset, 3, 1, seed=0)

    def seeds(seed, step):
        return sorted(loaded(dataset, store, seed).load_batch(plan.window(step)[0])["seeds"].tolist())

    assert seeds(0, 0) == seeds(0, 0)
    assert not set(seeds(0, 0)) & set(seeds(0, 1))
    assert not set(seeds(0, 0)) & set(seeds(1, 0))


def test_uncached_text_gives_token_ids_of_the_drawn_caption(tmp_path):
    dataset = built(good(tmp_path / "ds", 3), resolution=64, caption_dropout=1.0)
    batch = loaded(dataset, tmp_path / "store", cache_text=False).load_batch(BatchPlan(dataset, 3, 1, 0).window(0)[0])
    assert "prompt_embeds" not in batch
    assert batch["input_ids"].shape == (3, 77)
    assert (batch["input_ids"][:, 1:] == 1).all(), "the caption was dropped"


def test_validation_batches_never_change(tmp_path):
    dataset = built(mixed(tmp_path / "ds"), resolution=192, validation_fraction=0.4, flip=True, shuffle_captions=True)
    first, second = (list(loaded(dataset, tmp_path / "store", seed).validation_batches(2)) for seed in (0, 1))
    assert sum(len(batch["seeds"]) for batch in first) == len(dataset.validation) == 3
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_ram_cache_is_bounded_and_harmless(tmp_path):
    dataset = built(good(tmp_path / "ds", 6), resolution=64)
    roomy = loaded(dataset, tmp_path / "store")
    tight = ImageLoader(dataset, roomy.encoder, 0, ram_bytes=6000)
    plan = BatchPlan(dataset, 2, 1, seed=0)
    for step in range(6):
        one, other = roomy.load_batch(plan.window(step)[0]), tight.load_batch(plan.window(step)[0])
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert tight._held_bytes <= 6000
    assert len(tight._recent) < len(roomy._recent) == 12


def test_parts_of_unequal_length_are_the_familys_business():
    class Padding:
        def collate(self, examples):
            return {"a": torch.nn.utils.rnn.pad_sequence([e["a"] for e in examples], batch_first=True)}

    uneven = [{"a": torch.ones(2)}, {"a": torch.ones(3)}]
    assert collate(uneven, Padding())["a"].shape == (2, 3)
    assert collate(uneven[:1] * 2, Padding())["a"].shape == (2, 2)
    with pytest.raises(RuntimeError, match="equal size"):
        collate(uneven, object())


def test_order_is_the_same_in_another_process(tmp_path):
    ds = mixed(tmp_path / "ds")
    code = (
        "import sys; from pathlib import Path; from lora_trainer.config.schema import DataConfig\n"
        "from lora_trainer.data.batches import BatchPlan; from lora_trainer.data.dataset import build\n"
        "dataset = build(DataConfig(data_dir=sys.argv[1], resolution=192), Path(sys.argv[1]).parent / 'cache')\n"
        "print([BatchPlan(dataset, 2, 2, 42).window(s) for s in range(5)])"
    )
    here = str([BatchPlan(built(ds, resolution=192), 2, 2, 42).window(s) for s in range(5)])
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ds)], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == here


def test_an_epoch_is_ordered_once(tmp_path, monkeypatch):
    """Its order costs one hash per draw, however many of its windows are asked for: counted, not timed."""
    dataset = built(good(tmp_path / "ds", 1), repeats=3000)
    calls = 0
    original = batches.stable_hash

    def counting(*parts):
        nonlocal calls
        calls += 1
        return original(*parts)

    monkeypatch.setattr(batches, "stable_hash", counting)
    plan = BatchPlan(dataset, 2, 2, 0)
    for step in range(50):
        plan.window(step)
    assert calls == 3000
