"""The moving average: what it is, that it changes no training step, and that it survives saving."""

import copy

import pytest
import torch
from torch import nn

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.optim.averages import NAME, evaluation_weights
from lora_trainer.optim.optimizers import build_optimizer
from lora_trainer.optim.resume import load_state


def trained(ema: float, steps: int, optimizer: str = "adamw", size: int = 8) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(size))
    settings = TrainingConfig(ema=ema, learning_rate=0.1, optimizer=optimizer)
    made = build_optimizer([{"params": [parameter], "lr": 0.1}], settings)
    run(parameter, made, range(steps))
    return parameter, made


def run(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    path = []
    for step in steps:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


def test_the_average_is_as_defined():
    parameter = nn.Parameter(torch.ones(8))
    optimizer = build_optimizer([{"params": [parameter], "lr": 0.1}], TrainingConfig(ema=0.9))
    path = run(parameter, optimizer, range(5))
    expected = path[0]
    for steps, value in enumerate(path[1:], 2):
        decay = min(0.9, (1 + steps) / (10 + steps))
        expected = decay * expected + (1 - decay) * value
    with evaluation_weights(optimizer):
        assert torch.allclose(parameter, expected)
    assert torch.equal(parameter, path[-1])


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "lion8bit", "adamw8bit"])
def test_training_is_what_it_was(optimizer):
    plain, _ = trained(0.0, 4, optimizer)
    followed, made = trained(0.9, 4, optimizer)
    assert torch.equal(plain, followed)
    assert made.state[followed][NAME].dtype is torch.float32


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_it_is_saved_and_gone_on_with(optimizer):
    straight, made = trained(0.9, 6, optimizer)
    stopped, before = trained(0.9, 3, optimizer)
    saved = copy.deepcopy(before.state_dict())
    resumed, after = trained(0.9, 0, optimizer)
    with torch.no_grad():
        resumed.copy_(stopped)
    load_state(after, saved, TrainingConfig(ema=0.9, learning_rate=0.1, optimizer=optimizer))
    run(resumed, after, range(3, 6))
    assert torch.equal(resumed, straight)
    assert torch.equal(after.state[resumed][NAME], made.state[straight][NAME])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_run_resumed_without_it_forgets_the_average(optimizer):
    _, before = trained(0.9, 3, optimizer)
    resumed, after = trained(0.0, 0, optimizer)
    load_state(after, before.state_dict(), TrainingConfig(learning_rate=0.1, optimizer=optimizer))
    path = run(resumed, after, range(3, 6))
    with evaluation_weights(after):
        assert torch.equal(resumed, path[-1])
    assert not any(NAME in state for state in after.state.values())


def test_a_run_resumed_with_it_starts_an_average():
    stopped, before = trained(0.0, 3)
    resumed, after = trained(0.9, 0)
    load_state(after, before.state_dict(), TrainingConfig(ema=0.9, learning_rate=0.1))
    with evaluation_weights(after):
        assert torch.equal(resumed, torch.ones(8)), "none yet"
    with torch.no_grad():
        resumed.copy_(stopped)
    first, second = run(resumed, after, range(3, 5))
    with evaluation_weights(after):
        assert torch.allclose(resumed, 0.25 * first + 0.75 * second)


def test_without_steps_there_is_nothing_to_average():
    parameter, optimizer = trained(0.9, 0)
    with evaluation_weights(optimizer):
        assert torch.equal(parameter, torch.ones(8))
