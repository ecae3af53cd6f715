"""Moments in host memory: the same numbers, nothing of them on the device between steps, states that go either way."""

import copy

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.config.schema import Config, TrainingConfig
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import ConfigError
from lora_trainer.machine.hardware import Precision
from lora_trainer.optim.averages import evaluation_weights
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.optim.resume import load_state
from lora_trainer.planner.simulate import state_tensors
from lora_trainer.planner.techniques import make_plan
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.optimizer_offload import OptimizerOffload

CPU = torch.device("cpu")
SIZES = {"unet.a.lora_A.weight": (64, 96), "unet.a.lora_B.weight": (96, 64), "text_encoder.b.lora_A.weight": (8, 8)}
OPTIMIZERS = ("adamw", "adamw8bit", "lion8bit", "adafactor", "came")


class Training:
    def __init__(self, settings: TrainingConfig, *, offloaded: bool, inner: Optimizer8bit | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.named = {name: nn.Parameter(torch.randn(size, generator=generator)) for name, size in SIZES.items()}
        plan = MemoryPlan((OptimizerOffload(inner),) if offloaded else (inner,) if inner else ())
        self.settings, self.optimizer = settings, plan.build_optimizer(param_groups(self.named, settings), settings)

    def steps(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(step)
            for parameter in self.named.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * (1 + step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def flat(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.named.values()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_numbers_are_the_same(name, ema):
    settings = TrainingConfig(optimizer=name, learning_rate=1e-2, lora_plus_ratio=4, ema=ema)
    plain, away = Training(settings, offloaded=False), Training(settings, offloaded=True)
    plain.steps(0, 4)
    away.steps(0, 4)
    assert torch.equal(plain.flat(), away.flat())
    with evaluation_weights(plain.optimizer), evaluation_weights(away.optimizer):
        assert torch.equal(plain.flat(), away.flat())


def test_with_8_bit_moments():
    settings = TrainingConfig(learning_rate=1e-2)
    plain, away = (Training(settings, offloaded=offloaded, inner=Optimizer8bit()) for offloaded in (False, True))
    plain.steps(0, 3)
    away.steps(0, 3)
    assert torch.equal(plain.flat(), away.flat())
    state = away.optimizer.state[away.named["unet.a.lora_A.weight"]].values()
    assert {value.dtype for value in state if isinstance(value, Tensor) and value.numel() > 4096} == {torch.uint8}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("offloaded", [(True, False), (False, True), (True, True)])
def test_a_state_goes_on_either_way(name, offloaded):
    settings = TrainingConfig(optimizer=name, learning_rate=1e-2)
    straight, first = Training(settings, offloaded=False), Training(settings, offloaded=offloaded[0])
    straight.steps(0, 4)
    first.steps(0, 2)
    second = Training(settings, offloaded=offloaded[1])
    with torch.no_grad():
        for parameter, value in zip(second.named.values(), first.named.values(), strict=True):
            parameter.copy_(value)
    load_state(second.optimizer, copy.deepcopy(first.optimizer.state_dict()), settings)
    second.steps(2, 2)
    assert torch.equal(second.flat(), straight.flat())


def test_nothing_of_the_moments_stays_on_the_device():
    training = Training(TrainingConfig(), offloaded=True)
    adapter = sum(parameter.nbytes for parameter in training.named.values())
    largest = max(parameter.nbytes for parameter in training.named.values())
    with MemoryTracker() as tracker:
        tracker.mark(training.named.values(), "adapter")
        training.steps(0, 2)
        tracker.mark(state_tensors(training.optimizer), "optimizer")
        assert tracker.now < adapter + 4096  # counters
        assert tracker.host_now >= 2 * adapter - 4096
        assert tracker.peak < 2 * adapter + 5 * largest + 8192  # gradients, the moments of one and temporaries
        assert tracker.transferred == pytest.approx(2 * adapter + 2 * 2 * adapter, rel=0.05)  # out; in and out


@pytest.mark.parametrize("name", ["prodigy", "schedulefree_adamw"])
def test_optimizers_that_cannot_be_taken_apart_are_refused(name, tmp_path):
    config = Config.model_validate({"training": {"optimizer": name}, "memory": {"optimizer_offload": "yes"}})
    with pytest.raises(ConfigError, match=name):
        make_plan(config, Precision(torch.float32, torch.float32, scaler=False), CPU, tmp_path)
