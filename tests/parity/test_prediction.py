"""Predicted peaks of every phase against real ones, at reduced width; bench/bench_accuracy.py holds the whole matrix."""

from pathlib import Path

import pytest
import torch
from helpers.measured_run import (
    PHASES,
    Case,
    measure,
    measure_between,
    measure_caching,
    predict,
    training_peak,
    write_base,
)

from lora_trainer.planner.simulate import Shape, simulate_captions, simulate_images, simulate_run
from lora_trainer.planner.techniques import make_plan

CHECKPOINTING = {"gradient_checkpointing": "yes"}
CASES = {
    "sd15 plain": Case("sd15-small", (128, 128), options={"model": {"lora_targets": "all"}}),
    "sd15 checkpointing": Case(
        "sd15-small", (128, 192), batch=2, accumulation=2, precision="fp32", options={"training": CHECKPOINTING}
    ),
    "sd15 nf4": Case("sd15-small", (128, 128), options={"memory": {"base_quantization": "nf4"}}),
    "sd15 int8, text encoder": Case(
        "sd15-small",
        (128, 128),
        options={
            "model": {"train_text_encoder": True},
            "training": CHECKPOINTING,
            "memory": {"base_quantization": "int8", "block_streaming": 0.5},
        },
    ),
    "sdxl streamed": Case(
        "sdxl-small",
        (256, 256),
        batch=2,
        options={"training": CHECKPOINTING, "memory": {"block_streaming": 1.0, "activation_offload": "yes"}},
    ),
    "sdxl optimizers": Case(
        "sdxl-small",
        (128, 128),
        options={"model": {"lora_rank": 64}, "training": {**CHECKPOINTING, "use_8bit_optimizer": "yes"}},
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {size: write_base(folder / size, size) for size in ("sd15-small", "sdxl-small")}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prediction_is_what_a_real_run_needs(bases, case):
    predicted, real = predict(case, bases[case.size]).phases, measure(case, bases[case.size]).phases
    for phase in PHASES:
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=0.01), phase
        assert predicted[phase].host == pytest.approx(real[phase].host, rel=0.01) or phase == "load"
        assert predicted[phase].causes["adapter"] == real[phase].causes["adapter"] or phase == "load"
        assert predicted[phase].causes["frozen"] == real[phase].causes["frozen"] or phase == "load"
    assert predicted["optimizer"].causes["optimizer"] == pytest.approx(real["optimizer"].causes["optimizer"], rel=0.01)
    assert training_peak(predicted) > 0.995 * training_peak(real)


@pytest.mark.parametrize("name", ["sd15 int8, text encoder", "sdxl streamed"])
def test_validation_and_previews_are_foreseen(bases, name):
    case = CASES[name]
    family, config = case.open(bases[case.size])
    plan = make_plan(config, case.compute(), torch.device("cpu"), Path())
    shape = Shape(case.batch, case.resolution, case.accumulation, previews=True, validation=True)
    predicted = simulate_run(family, config, case.compute().frozen, plan, shape).phases
    real = measure_between(case, bases[case.size])
    for phase in ("validation", "preview"):
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=0.01), phase


@pytest.mark.parametrize("name", ["sd15 plain", "sdxl streamed"])
def test_the_caching_phase_is_foreseen(bases, name):
    case = CASES[name]
    family, _ = case.open(bases[case.size])
    dtype, real = case.compute().frozen, measure_caching(case, bases[case.size])
    predicted = {
        "text_cache": simulate_captions(family, dtype),
        "latent_cache": simulate_images(family, dtype, case.resolution),
    }
    for phase in ("text_cache", "latent_cache"):
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=0.01), phase
