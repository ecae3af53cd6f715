"""What the optimizer in the backward pass refuses, and that it can be taken off again. Parity: tests/parity."""

import pytest
import torch
from streaming_models import Chain, gradients
from torch import nn

from lora_trainer.config.schema import Config, TrainingConfig
from lora_trainer.errors import ConfigError
from lora_trainer.machine.hardware import Precision
from lora_trainer.planner.techniques import make_plan
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward

CPU = torch.device("cpu")


def precision(scaler: bool) -> Precision:
    return Precision(torch.float16 if scaler else torch.bfloat16, torch.float16, scaler)


@pytest.mark.parametrize(
    ("changes", "scaler", "named"),
    [
        ({"max_grad_norm": 0.0}, False, None),
        ({}, False, "norma_maxima_gradiente"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 4}, False, "passos_acumulacao_gradiente"),
        ({"max_grad_norm": 0.0}, True, "fp16"),
        ({"max_grad_norm": 0.0, "optimizer": "prodigy"}, False, "prodigy"),
    ],
)
def test_what_needs_all_gradients_at_once_is_named(changes, scaler, named, tmp_path):
    """Also where only the machine knows of it, as of fp16."""
    config = Config.model_validate({"training": changes, "memory": {"optimizer_in_backward": "yes"}})
    if named is None:
        assert any(isinstance(one, OptimizerInBackward) for one in make_plan(config, precision(scaler), CPU, tmp_path).techniques)
        return
    with pytest.raises(ConfigError, match=named):
        make_plan(config, precision(scaler), CPU, tmp_path)


def test_a_closed_optimizer_leaves_parameters_alone():
    model = Chain(2)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = OptimizerInBackward().build([{"params": list(named.values()), "lr": 1.0}], TrainingConfig())
    optimizer.close()
    assert len(gradients(model, torch.randn(2, 16))) == 2


def test_a_gradient_set_by_hand_is_stepped_on():
    weight = nn.Parameter(torch.zeros(4))
    optimizer = OptimizerInBackward().build([{"params": [weight], "lr": 0.1}], TrainingConfig(weight_decay=0.0))
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((4,), -0.1))
    assert weight.grad is None
    assert optimizer.state_dict()["state"][0]["step"] == 1
