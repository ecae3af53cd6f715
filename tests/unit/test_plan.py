"""The planner on a small SDXL: fastest that fits, what is written stays, the returned plan is simulated."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.original_checkpoint import write_single_file

from lora_trainer.config.declared import with_values
from lora_trainer.config.names import Key
from lora_trainer.config.schema import Config
from lora_trainer.families import resolve
from lora_trainer.machine.hardware import Precision
from lora_trainer.planner import plan
from lora_trainer.planner.estimate import peak_at
from lora_trainer.planner.ladder import SOLVED
from lora_trainer.planner.plan import (
    CHECKPOINTING,
    OFFLOAD,
    QUANTIZATION,
    STREAMING,
    Candidate,
    Planner,
)
from lora_trainer.planner.rungs import Rungs
from lora_trainer.planner.simulate import Prediction, Shape
from lora_trainer.seam.family import Family
from lora_trainer.techniques.embedding_offload import EmbeddingOffload
from lora_trainer.techniques.fp8_e5m2 import Fp8E5m2
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.optimizer_offload import OptimizerOffload
from lora_trainer.techniques.quantize_8bit import Quantize8bit

BF16 = Precision(torch.bfloat16, torch.bfloat16, scaler=False)
OPTIMIZER_8BIT, OPTIMIZER_OFFLOAD = Optimizer8bit.key, OptimizerOffload.key
IN_BACKWARD: Key = ("memory", "optimizer_in_backward")
NOTHING: dict[Key, Any] = {key: "no" for key in SOLVED if key != EmbeddingOffload.key}
LOSSY = ({OPTIMIZER_8BIT: "yes"}, {OPTIMIZER_8BIT: "yes", QUANTIZATION: "int8"}, {OPTIMIZER_8BIT: "yes", QUANTIZATION: "nf4"})
LEAN = {**NOTHING, CHECKPOINTING: "yes"}
FULL = {**LEAN, STREAMING: 1.0, OFFLOAD: "yes"}
AWAY = {**FULL, OPTIMIZER_OFFLOAD: "yes"}
SHAPE = Shape(1, (1024, 1024), previews=False)
SIMULATED: dict[Any, Prediction] = {}
Make = Callable[..., Planner]


def deeper(configs: dict[str, dict[str, Any]]) -> None:
    """Enough weights in enough blocks that streaming them is worth it."""
    configs["unet"] |= {
        "block_out_channels": [64, 256], "transformer_layers_per_block": [1, 3], "attention_head_dim": [1, 4],
    }  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "base.safetensors"
    write_single_file(path, "sdxl", change=deeper)
    return path


@pytest.fixture(scope="module")
def known(base: Path) -> dict[str, int]:
    """Peaks of the plans that the tests set their limits by."""
    planner = make_planner(base)
    lossy = {**AWAY, **LOSSY[-1]}
    plans = {
        "nothing": NOTHING, "lean": LEAN, "streamed": {**LEAN, STREAMING: 1.0}, "full": FULL, "away": AWAY, "lossy": lossy,
    }  # fmt: skip
    return {name: planner.simulate(values).peak for name, values in plans.items()}


@pytest.fixture
def make(base: Path) -> Make:
    return lambda *args, **options: make_planner(base, *args, **options)


def make_planner(base: Path, available: int | None = None, **options: Any) -> Planner:
    """Simulations are made once for all tests."""
    written = options.pop("written", {})
    config = Config.model_validate({"model": {"base_model": str(base), "lora_rank": 16}})
    config = with_values(config, {**written, **options.pop("preset", {})})
    family: Family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)
    shape = options.pop("shape", SHAPE)

    def recall(values: Mapping[Key, Any], simulate: Callable[[], Prediction]) -> Prediction:
        key = (str(base), with_values(config, dict(values)).model_dump_json(), shape)
        if key not in SIMULATED:
            SIMULATED[key] = simulate()
        return SIMULATED[key]

    return Planner(family, config, BF16, shape, available, frozenset(written), recall=recall, **options)


def between(one: int, other: int) -> int:
    return (one + other) // 2


def solved(planner: Planner) -> Candidate:
    """The answer, which fits as simulated."""
    best = planner.solve()
    assert best in planner.tried
    assert best.fits(planner.available)
    return best


def test_the_tests_have_room(known: dict[str, int]) -> None:
    """Each technique takes something off, or the limits below would say nothing."""
    assert known["nothing"] > known["lean"] > known["streamed"] > known["full"] > known["away"] > known["lossy"]


def test_nothing_is_done_where_everything_fits(make: Make, known: dict[str, int]) -> None:
    assert solved(make(known["nothing"])).values == NOTHING
    assert solved(make(None)).values == NOTHING


def test_recomputation_comes_first(make: Make, known: dict[str, int]) -> None:
    best = solved(make(between(known["nothing"], known["lean"])))
    assert best.values == LEAN
    assert best.lossless


def test_no_more_is_streamed_than_needed(make: Make, known: dict[str, int]) -> None:
    planner = make(between(known["lean"], known["streamed"]))
    best = solved(planner)
    assert {**best.values, STREAMING: 0} == {**LEAN, STREAMING: 0}
    assert 0 < best.share < 1
    less = replace(best, values={**best.values, STREAMING: round(best.share - plan.STREAMING_STEP, 2) or "no"})
    assert planner.simulate(less.values).peak > (planner.available or 0)


def test_activations_leave_when_streaming_is_not_enough(make: Make, known: dict[str, int]) -> None:
    best = solved(make(known["full"]))
    assert best.values == FULL
    loosened = solved(make(between(known["streamed"], known["full"])))
    assert loosened.values[OFFLOAD] == "yes"
    assert loosened.lossless


def test_numbers_change_only_when_nothing_else_helps(make: Make, known: dict[str, int]) -> None:
    best = solved(make(known["away"] - 4096))
    assert not best.lossless
    assert best.values[OPTIMIZER_8BIT] == "yes"
    assert best.values[QUANTIZATION] == "int8"  # the mildest that does


def test_what_one_of_several_ways_to_pack_excludes_is_about_it_alone(
    make: Make, known: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in (Fp8E5m2, Quantize8bit):
        monkeypatch.setattr(one, "helps", classmethod(lambda cls, config: False))
    planner = make(known["lossy"])
    assert planner.solve().values[QUANTIZATION] == "nf4"
    assert not any(one.values[QUANTIZATION] == "int8" for one in planner.tried)


def test_moments_leave_last_of_what_changes_no_number(make: Make, known: dict[str, int]) -> None:
    best = solved(make(known["full"] - 4096))
    assert best.lossless
    assert best.values[OPTIMIZER_OFFLOAD] == "yes"
    fixed = solved(make(known["full"] - 4096, written={OPTIMIZER_OFFLOAD: "no"}))
    assert (fixed.values[OPTIMIZER_8BIT], fixed.values[QUANTIZATION]) == ("yes", "no")


def test_moments_of_an_optimizer_for_all_parameters_cannot_leave(make: Make, known: dict[str, int]) -> None:
    planner = make(known["lossy"], written={("training", "optimizer"): "prodigy"})
    planner.solve()
    assert not any(OPTIMIZER_OFFLOAD in one.values for one in planner.tried)


def test_what_cannot_fit_is_told_without_trying_everything(make: Make, known: dict[str, int]) -> None:
    planner = make(known["lossy"] // 4)
    best = planner.solve()
    assert not best.fits(planner.available)
    assert len(planner.tried) <= 3
    assert best.peak == min(one.peak for one in planner.tried)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 0.9])
def test_two_or_three_simulations_do(make: Make, known: dict[str, int], share: float) -> None:
    planner = make(int(known["full"] + share * (known["nothing"] - known["full"])))
    solved(planner)
    assert len(planner.tried) <= 3


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_the_estimate_of_a_share_is_exact(make: Make, share: float) -> None:
    planner = make()
    lean, streamed = planner.simulate(LEAN), planner.simulate({**LEAN, STREAMING: share})
    assert peak_at(lean.peak, 0.0, share, planner.blocks) == pytest.approx(streamed.peak, rel=0.002)


@pytest.mark.parametrize(
    "written",
    [{STREAMING: "no"}, {CHECKPOINTING: "no"}, {OFFLOAD: "no"}, {STREAMING: 0.5, CHECKPOINTING: "yes"}],
)
def test_what_the_user_wrote_stays(make: Make, known: dict[str, int], written: dict[Key, Any]) -> None:
    for limit in (known["nothing"], known["full"]):
        planner = make(limit, written=written)
        assert {key: planner.solve().values[key] for key in written} == written
        for candidate in planner.tried:
            assert {key: candidate.values[key] for key in written} == written
            if candidate.values[CHECKPOINTING] == "no":  # they need it
                assert (candidate.values[STREAMING], candidate.values[OFFLOAD]) == ("no", "no")


@pytest.mark.parametrize("written", [{STREAMING: 0.5}, {OFFLOAD: "yes"}])
def test_what_the_user_wrote_brings_recomputation_along(make: Make, written: dict[Key, Any]) -> None:
    """Also where there is all the room in the world: without it, streamed weights are gone before the backward pass."""
    for available in (1 << 40, None):
        assert solved(make(available, written=written)).values == {**NOTHING, **written, CHECKPOINTING: "yes"}


def test_auto_is_not_an_answer(make: Make, known: dict[str, int]) -> None:
    written = dict.fromkeys((CHECKPOINTING, STREAMING, OFFLOAD), "auto")
    assert solved(make(known["nothing"], written=written)).values == NOTHING


def test_an_optimizer_without_8_bits_keeps_its_moments(make: Make, known: dict[str, int]) -> None:
    planner = make(known["lossy"], written={("training", "optimizer"): "adafactor"})
    planner.solve()
    assert all(one.values[OPTIMIZER_8BIT] == "no" for one in planner.tried)


def test_a_named_preset_comes_first(make: Make, known: dict[str, int]) -> None:
    """It is slower than needed, but it was asked for."""
    preset = {CHECKPOINTING: "yes", STREAMING: 0.5}
    assert solved(make(known["nothing"], preset=preset, preset_first=True)).values == {**LEAN, STREAMING: 0.5}
    assert solved(make(known["nothing"], preset=preset)).values == NOTHING


def test_a_named_preset_is_tightened_but_never_loosened(make: Make, known: dict[str, int]) -> None:
    preset = {CHECKPOINTING: "yes", STREAMING: 0.5}
    best = solved(make(known["full"], preset=preset, preset_first=True))
    assert best.values == FULL
    best = solved(make(between(known["streamed"], known["full"]), preset=preset, preset_first=True))
    assert best.share >= 0.5


def test_previews_count(make: Make) -> None:
    planner = make(None, shape=Shape(1, (256, 256), previews=True, validation=True, preview_resolution=(768, 768)))
    candidate = planner.simulate(LEAN)
    peaks = candidate.prediction.phases
    assert {"validation", "preview"} <= set(peaks)
    assert peaks["preview"].total == candidate.peak > max(peaks["forward"].total, peaks["backward"].total)


# -- the ladder


def test_the_rungs_below_and_the_reasons(make: Make, known: dict[str, int]) -> None:
    planner = make(between(known["nothing"], known["lean"]))
    rungs = Rungs(planner, planner.solve())
    below = list(rungs.below())
    assert [one.values[OFFLOAD] for one in below] == ["yes"] * len(below)
    assert [one.values[STREAMING] for one in below][1:] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [one.values[OPTIMIZER_OFFLOAD] for one in below] == ["no"] * 5 + ["yes"]
    assert below[-1].peak < below[1].peak < known["lean"]
    assert below[-1].transferred > below[1].transferred > 0
    assert rungs.without() == {CHECKPOINTING: known["nothing"]}


def test_what_offloading_saves_is_not_what_recomputation_does(make: Make, known: dict[str, int]) -> None:
    """A plan without recomputation, tried too, keeps far more activations."""
    planner = make(between(known["nothing"], known["lean"]), preset={CHECKPOINTING: "yes"}, preset_first=True)
    best, fast = planner.simulate(LEAN), planner.simulate(NOTHING)
    assert fast.prediction.phases["backward"].causes["activations"] > best.prediction.phases["backward"].causes["activations"]
    offloaded = next(one for one in Rungs(planner, best).below() if one.values[OFFLOAD] == "yes")
    assert offloaded.peak == pytest.approx(planner.simulate({**LEAN, OFFLOAD: "yes"}).peak, rel=0.2)


def test_a_smaller_micro_batch_where_nothing_lossless_fits(make: Make, known: dict[str, int]) -> None:
    """As much work a step, and no number changed. What fits as it is stays in one piece."""
    four = replace(SHAPE, batch_size=4)
    tight = make(None, shape=four).simulate(AWAY).peak - 4096
    assert tight > known["full"]
    planner = make(tight, shape=four)
    best = solved(planner)
    assert best.lossless
    assert best.micro_batch == 2
    assert planner.at(2).shape == replace(SHAPE, batch_size=2, accumulation=2)
    assert {one.micro_batch for one in planner.tried if one.fits(tight)} == {2}
    assert all(one.micro_batch == 2 for one in Rungs(planner, best).planner.own)
    assert max(one.micro_batch for one in Rungs(planner, best).below()) <= 2
    assert solved(make(tight + 8192, shape=four)).micro_batch == 4


def test_micro_batches_that_cannot_do_are_not_simulated(make: Make, known: dict[str, int]) -> None:
    planner = make(known["lossy"] // 4, shape=replace(SHAPE, batch_size=4))
    assert not planner.solve().fits(planner.available)
    assert {one.micro_batch for one in planner.tried} == {4}


def test_where_a_window_cannot_be_split_it_is_not(make: Make) -> None:
    options = {"shape": replace(SHAPE, batch_size=4), "written": {IN_BACKWARD: "yes", ("training", "max_grad_norm"): 0.0}}
    tight = make(None, **options).simulate({key: value for key, value in FULL.items() if key != OPTIMIZER_OFFLOAD}).peak - 4096
    planner = make(tight, **options)
    planner.solve()
    assert {one.micro_batch for one in planner.tried} == {4}


def test_a_batch_is_split_first(make: Make) -> None:
    planner = make(None, shape=replace(SHAPE, batch_size=4))
    planner.simulate(LEAN)
    rungs = Rungs(planner, planner.tried[0])
    assert [one.micro_batch for one in rungs.below()][:3] == [2, 1, 1]
    assert not any(one.simulated for one in rungs.below())


def test_estimates_of_rungs_are_near(make: Make, known: dict[str, int]) -> None:
    planner = make(None)
    rungs = Rungs(planner, planner.simulate(LEAN))
    offloaded = {**LEAN, OFFLOAD: "yes"}
    estimated = next(one for one in rungs.below() if one.values == offloaded)
    assert not estimated.simulated
    assert estimated.peak == pytest.approx(planner.simulate(offloaded).peak, rel=0.2)


def test_remedies_have_amounts_that_a_simulation_confirms(make: Make) -> None:
    shape = replace(SHAPE, batch_size=2)
    planner = make(1, written={CHECKPOINTING: "no", STREAMING: "no", OFFLOAD: "no", QUANTIZATION: "no"}, shape=shape)
    best = planner.solve()
    saves = Rungs(planner, best).saves(simulate=True)
    assert saves["training", "batch_size"] > 0.3 * best.peak
    assert saves[CHECKPOINTING] > 0
    assert saves["model", "lora_rank"] > 0
    assert all(0 < saved < best.peak for saved in saves.values())


def test_rungs_are_worked_out_from_plans_of_their_kind(make: Make) -> None:
    """What offload takes off a plan without recomputation is many times what it takes off one with it."""
    planner = make(None, shape=replace(SHAPE, batch_size=4))
    planner.simulate({**LEAN, CHECKPOINTING: "no"})
    rungs = Rungs(planner, planner.simulate(LEAN))
    assert min(one.peak for one in rungs.below()) > 0
