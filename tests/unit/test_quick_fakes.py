"""QuickFakeMode predicts what PyTorch's own fakes predict, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.original_checkpoint import write_single_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.config.schema import Config
from lora_trainer.engine.fake import QuickFakeMode
from lora_trainer.families import resolve
from lora_trainer.machine.hardware import Precision
from lora_trainer.planner import simulate
from lora_trainer.planner.simulate import Prediction, Shape, simulate_run, simulation_device
from lora_trainer.planner.techniques import make_plan

SETTINGS: list[dict[str, dict[str, Any]]] = [
    {
        "model": {"lora_targets": "all", "train_text_encoder": True},
        "training": {"gradient_checkpointing": "yes"},
        "memory": {"block_streaming": 0.5, "activation_offload": "yes"},
    },
    {
        "training": {"gradient_checkpointing": "no", "use_8bit_optimizer": "yes"},
        "memory": {"base_quantization": "nf4"},
    },
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quick") / "base.safetensors"
    write_single_file(path, "sd1")
    return path


def predict(base: Path, settings: dict[str, dict[str, Any]]) -> Prediction:
    config = Config.model_validate({**settings, "model": {"base_model": str(base), **settings.get("model", {})}})
    family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)
    precision = Precision(torch.bfloat16, torch.bfloat16, scaler=False)
    plan = make_plan(config, precision, simulation_device(), Path())
    return simulate_run(family, config, torch.bfloat16, plan, Shape(2, (128, 192), accumulation=2, previews=False))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_to_the_byte(base: Path, settings: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = predict(base, settings)
    monkeypatch.setattr(simulate, "QuickFakeMode", lambda: FakeTensorMode(allow_non_fake_inputs=True))
    assert predict(base, settings) == quick


@pytest.mark.parametrize("optimizer", ["prodigy", "came", "schedulefree_adamw", "lion8bit"])
def test_optimizers_that_look_at_values_can_be_simulated(base: Path, optimizer: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    prediction = predict(base, {"training": {"optimizer": optimizer}})
    assert prediction.phases["optimizer"].causes["adapter"] > 0


def test_views_share_their_storage_and_fresh_tensors_do_not() -> None:
    with QuickFakeMode():
        x = torch.empty(4, 6)
        for _ in range(2):  # the second time from what is known
            view, fresh = x.view(6, 4), x + 1
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert fresh.untyped_storage()._cdata != x.untyped_storage()._cdata
            assert (view.shape, fresh.shape) == ((6, 4), (4, 6))
            assert x[1:].storage_offset() == 6
            assert x.add_(1) is x


def test_shapes_dtypes_and_scalars_are_told_apart() -> None:
    with QuickFakeMode():
        whole, half = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.bfloat16)
        for _ in range(2):
            assert (whole * 2).dtype == torch.float32
            assert (half * 2).dtype == torch.bfloat16
            assert torch.empty(2, 3, dtype=torch.int64).mul(2).dtype == torch.int64
            assert torch.empty(2, 3, dtype=torch.int64).mul(2.0).dtype == torch.float32
            assert whole.sum(0).shape == (3,)
            assert whole.sum(1).shape == (2,)
            assert [part.shape[0] for part in torch.empty(5, 1).split(2)] == [2, 2, 1]


def test_rows_are_selected_where_they_lie_and_a_factor_changes_no_shape() -> None:
    for mode in (QuickFakeMode(), FakeTensorMode()):
        with mode:
            x = torch.empty(2, 4, 6)[:, 1:]
            rows = [x.select(1, index) for index in (0, 2, -1)]
            assert [row.storage_offset() for row in rows] == [6, 18, 18]
            assert {(row.shape, row.stride(), row.dtype) for row in rows} == {((2, 6), (24, 1), torch.float32)}
            assert all(row.untyped_storage()._cdata == x.untyped_storage()._cdata for row in rows)
            blended = [row * (1 - share / 8) + row * (share / 8) for share, row in enumerate(rows)]
            assert {(made.shape, made.stride(), made.dtype) for made in blended} == {((2, 6), (6, 1), torch.float32)}


def test_gradients_flow() -> None:
    with QuickFakeMode():
        layer = nn.Linear(8, 4)
        for _ in range(2):
            layer(torch.empty(3, 8)).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.shape == (4, 8)


def test_a_tensor_with_a_known_value_keeps_it() -> None:
    """Adam counts its steps so, and divides by what follows from them."""
    with QuickFakeMode():
        step = torch.tensor(0.0)
        step += 1
        assert step.item() == 1
