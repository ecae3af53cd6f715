"""Predicted peaks of transformer families against real ones: 16 bits and nf4 at reduced width, fp8 and GGUF from their files."""

import json
from pathlib import Path

import pytest
from helpers.bases import NAMES, STORED, of, written
from helpers.measured_run import PHASES, Case, measure, predict, training_peak

from lora_trainer.families import family_class
from lora_trainer.files.kinds import signatures

CHECKPOINTING = {"gradient_checkpointing": "yes"}
STREAMED = {"block_streaming": 1.0, "activation_offload": "yes"}
OPTIONS: dict[str, dict[str, dict[str, object]]] = {
    "plain": {},
    "streamed": {"training": CHECKPOINTING, "memory": STREAMED},
    "nf4 streamed": {"training": CHECKPOINTING, "memory": {"base_quantization": "nf4", **STREAMED}},
}


def compare(case: Case, base: Path | None, *, tolerance: float = 0.01) -> None:
    predicted, real = predict(case, base).phases, measure(case, base).phases
    for phase in PHASES:
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=tolerance), phase
        assert predicted[phase].causes["adapter"] == real[phase].causes["adapter"] or phase == "load"
        assert predicted[phase].causes["frozen"] == real[phase].causes["frozen"] or phase == "load"
    assert training_peak(predicted) == pytest.approx(training_peak(real), rel=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_random_weights(tmp_path, name, options):
    """The released architecture, narrowed."""
    released = json.loads((family_class(name).shipped_architecture() / "transformer" / "config.json").read_text("utf-8"))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(released | of(name).tiny.narrow))
    model = {"architecture": str(tmp_path), "lora_rank": 16}
    compare(Case(name, (128, 128), options={**options, "model": model, "data": shortest(name)}), None)


@pytest.mark.parametrize(("name", "kind"), [pair for pair in STORED if pair[1] != "fp8_scaled"])
def test_weights_kept_as_stored(name, kind):
    files, _ = written(name, kind)
    options = {**OPTIONS["streamed"], "model": files, "data": shortest(name)}
    compare(Case(name, (128, 128), options=options), Path(files["base_model"]), tolerance=0.02)


def shortest(name: str) -> dict[str, object]:
    return {"max_caption_tokens": min(signatures()[name].caption_tokens)}
