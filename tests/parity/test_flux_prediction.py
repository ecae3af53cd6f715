"""Predicted peaks of FLUX.1 against real ones: 16 bits and nf4 at reduced width, fp8 and GGUF from their files."""

import json
from pathlib import Path

import pytest
from helpers.flux_bases import write_files
from helpers.measured_run import PHASES, Case, measure, predict, training_peak

from lora_trainer.families import _architecture

CHECKPOINTING = {"gradient_checkpointing": "yes"}
STREAMED = {"block_streaming": 1.0, "activation_offload": "yes"}
OPTIONS: dict[str, dict[str, dict[str, object]]] = {
    "plain": {},
    "streamed": {"training": CHECKPOINTING, "memory": STREAMED},
    "nf4 streamed": {"training": CHECKPOINTING, "memory": {"base_quantization": "nf4", **STREAMED}},
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released architecture at a twelfth of its width, with fewer blocks."""
    folder = tmp_path_factory.mktemp("narrow")
    config = _architecture.shipped("flux", "transformer") | {
        "num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2, "joint_attention_dim": 4096,
    }  # fmt: skip
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


def compare(case: Case, base: Path | None, *, tolerance: float = 0.01) -> None:
    predicted, real = predict(case, base).phases, measure(case, base).phases
    for phase in PHASES:
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=tolerance), phase
        assert predicted[phase].causes["adapter"] == real[phase].causes["adapter"] or phase == "load"
        assert predicted[phase].causes["frozen"] == real[phase].causes["frozen"] or phase == "load"
    assert training_peak(predicted) == pytest.approx(training_peak(real), rel=tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_random_weights(narrow, options):
    model = {"architecture": str(narrow), "lora_rank": 16}
    compare(Case("flux", (128, 128), options={**options, "model": model, "data": {"max_caption_tokens": 128}}), None)


@pytest.mark.parametrize("kind", ["fp8", "gguf"])
def test_weights_kept_as_stored(tmp_path, kind):
    files, _ = write_files(tmp_path, kind)
    options = {**OPTIONS["streamed"], "model": files, "data": {"max_caption_tokens": 128}}
    compare(Case("flux", (128, 128), options=options), Path(files["base_model"]), tolerance=0.02)
