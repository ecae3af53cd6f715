"""LoHa, LoKr and PiSSA under the memory techniques: the numbers of the plain run, and the peaks that were predicted."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.bases import NAMES, of, plain
from helpers.measured_run import CPU, PHASES, Case, measure, predict, random_batch, set_up, training_peak, write_base

from lora_trainer import loop
from lora_trainer.adapters import inject
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.export.verify import Verification, verify
from lora_trainer.export.write import save_adapter
from lora_trainer.families import family_class, resolve

KINDS: dict[str, dict[str, Any]] = {
    "loha": {"adapter_kind": "loha", "lora_targets": "all"},
    "lokr": {"adapter_kind": "lokr", "lokr_factor": 4, "lora_targets": "all"},
    "pissa": {"lora_init": "pissa", "lora_targets": "all"},
    "rules": {"lora_rules": [{"target": "to_q", "rank": 2, "rate": 1e-2}]},
}
CHECKPOINTING = {"gradient_checkpointing": "yes"}
STREAMED = {"block_streaming": 1.0, "activation_offload": "yes"}


@cache
def base(name: str) -> Path:
    """A file to read, so that every run has the same weights."""
    return Path(plain(name)["base_model"]) if name == "flux" else write_base(Path(mkdtemp()) / name, name)


def options(name: str, kind: str, training: dict[str, Any], memory: dict[str, Any]) -> dict[str, dict[str, Any]]:
    model = {"lora_rank": 4, "lora_alpha": 4, **KINDS[kind], **(plain(name) if name == "flux" else {})}
    data = {"max_caption_tokens": 128} if name == "flux" else {}
    return {"model": model, "data": data, "training": {"learning_rate": 1e-3, "max_grad_norm": 0.0, **training}, "memory": memory}


def trained(name: str, kind: str, training: dict[str, Any], memory: dict[str, Any], precision: str = "fp32") -> Any:
    """(losses of two steps, the adapter's tensors, what was set up) from adapters that have left their start."""
    case = Case(name, (64, 64), 2, precision=precision, options=options(name, kind, training, memory))
    family, config = case.open(base(name))
    setup = set_up(case, family, config, Path(mkdtemp()))
    disturb(setup.adapter)
    windows = ((step, [random_batch(family, case)]) for step in range(2))
    losses = [report.loss for report in loop.train(setup.trainee(), windows, lambda step: 1.0)]
    return losses, setup.adapter.state_dict(), setup


@torch.no_grad()
def disturb(adapter: Any) -> None:
    for number, parameter in enumerate(adapter.named_parameters().values()):
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))


@cache
def plain_run(name: str, kind: str) -> Any:
    return trained(name, kind, {}, {})


PAIRS = [("sd15-small", "loha"), ("flux", "lokr"), ("sd15-small", "pissa"), ("flux", "rules")]
LOSSLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "streamed, offloaded": (CHECKPOINTING, STREAMED),
    "stepped in the backward pass": (CHECKPOINTING, {"optimizer_in_backward": "yes"}),
}


@pytest.mark.parametrize("changes", LOSSLESS.values(), ids=LOSSLESS)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_technique_changes_no_number(name, kind, changes):
    expected, run = plain_run(name, kind), trained(name, kind, *changes)
    assert run[0] == pytest.approx(expected[0], rel=1e-5)
    assert run[1].keys() == expected[1].keys()
    assert all(torch.allclose(value, expected[1][key], atol=1e-4) for key, value in run[1].items())


@pytest.mark.parametrize(("name", "kind"), [("flux", "loha"), ("sd15-small", "pissa")])
def test_four_bits_streamed_are_four_bits(name, kind):
    nf4 = {"base_quantization": "nf4"}
    resident, streamed = trained(name, kind, {}, nf4, "bf16"), trained(name, kind, CHECKPOINTING, {**nf4, **STREAMED}, "bf16")
    assert streamed[0] == pytest.approx(resident[0], rel=1e-5)
    assert resident[0] == pytest.approx(plain_run(name, kind)[0], rel=0.15)
    assert all(torch.allclose(value, resident[1][key], atol=1e-4) for key, value in streamed[1].items())


@pytest.mark.parametrize(
    ("name", "layout", "kind"), [("sd15-small", "kohya", "loha"), ("flux", "diffusers", "lokr"), ("flux", "diffusers", "pissa")]
)
def test_a_base_in_four_bits_whose_blocks_come_and_go_gives_the_same_file(name, layout, kind, tmp_path):
    setup = trained(name, kind, CHECKPOINTING, {"base_quantization": "nf4", **STREAMED})[2]
    proved(setup.model, setup.adapter, setup.target.family, tmp_path / "x.safetensors", layout)


def proved(model: Any, adapter: Any, family: Any, path: Path, layout: Any) -> Verification:
    save_adapter(adapter, family, path, layout, "fp32", {})
    found = verify(model, adapter, family, path, family.probe)
    assert found.output_difference < 1e-4
    assert found.effect > 1e-4
    assert found.num_modules == len(adapter.layers)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_files_of_every_transformer_family(name, tmp_path):
    """LoKr through diffusers where its loader takes one."""
    for kind in ("loha", "lokr", "pissa"):
        settings = ModelConfig(**plain(name), lora_rank=2, lora_alpha=4, **{**KINDS[kind], "lora_targets": "attention"})
        family = resolve(settings, DataConfig())
        family.configure(TrainingConfig(), DataConfig())
        model = family.load_model(CPU, torch.float32)
        adapter = inject(model, family, settings, 0, family.formats)
        disturb(adapter)
        for layout in family.formats:
            found = proved(model, adapter, family, tmp_path / "x.safetensors", layout)
            if kind == "lokr":
                assert ("diffusers 0." in found.reader) == (layout == "diffusers" and name in ("flux2", "z_image"))


MEMORY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "streamed": (CHECKPOINTING, STREAMED),
    "nf4 streamed": (CHECKPOINTING, {"base_quantization": "nf4", **STREAMED}),
}


FORESEEN = [("sd15-small", "loha", "streamed"), ("flux", "loha", "nf4 streamed"), ("flux", "lokr", "plain"),
            ("sd15-small", "pissa", "nf4 streamed"), ("flux", "pissa", "plain")]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "changes"), FORESEEN)
def test_peaks_are_predicted(name, kind, changes, tmp_path):
    if name == "flux":
        released = json.loads((family_class(name).shipped_architecture() / "transformer" / "config.json").read_text("utf-8"))
        (tmp_path / "transformer").mkdir()
        (tmp_path / "transformer" / "config.json").write_text(json.dumps(released | of(name).tiny.narrow))
    found = options(name, kind, *MEMORY[changes])
    if name == "flux":
        found["model"] = {"architecture": str(tmp_path), "lora_rank": 4, **KINDS[kind]}
    case = Case(name, (128, 128), options=found)
    file = None if name == "flux" else base(name)
    predicted, real = predict(case, file).phases, measure(case, file).phases
    for phase in PHASES:
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=0.01), phase
        assert predicted[phase].causes["adapter"] == real[phase].causes["adapter"] or phase == "load"
    assert training_peak(predicted) == pytest.approx(training_peak(real), rel=0.01)


