"""H03: the learning rate follows optimizer steps, whatever the accumulation; curves have exact ends."""

import math
from itertools import pairwise

import pytest

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.optim.schedules import lr_factor, schedule_notices, warmup_steps

DECAYING = ("linear", "cosine", "cosine_restarts", "polynomial")


def curve(total: int, **settings: object) -> list[float]:
    config = TrainingConfig(**settings)
    return [lr_factor(step, total, config) for step in range(total)]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_h03_twenty_steps_warm_up_two_peak_at_two_end_at_twenty(name):
    factors = curve(20, lr_scheduler=name, lr_warmup=0.1)
    assert warmup_steps(20, TrainingConfig(lr_warmup=0.1)) == 2
    assert factors[:2] == [0.5, 1.0]
    assert max(factors[2:]) < 1
    assert factors[-1] == pytest.approx(0, abs=1e-15)
    assert all(later < earlier for earlier, later in pairwise(factors[1:]))


def test_h03_values_in_between():
    linear = curve(20, lr_scheduler="linear", lr_warmup=2)
    assert linear == pytest.approx([0.5] + [1 - k / 18 for k in range(19)])
    cosine = curve(20, lr_scheduler="cosine", lr_warmup=2)
    assert cosine == pytest.approx([0.5] + [(1 + math.cos(math.pi * k / 18)) / 2 for k in range(19)])


def test_without_warm_up_the_first_update_is_at_the_peak():
    for name in DECAYING:
        factors = curve(10, lr_scheduler=name)
        assert factors[0] == 1.0
        assert factors[-1] == pytest.approx(0, abs=1e-15)


def test_constant_stays_after_warm_up():
    assert curve(6, lr_scheduler="constant", lr_warmup=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


def test_min_ratio_is_met_at_the_last_step():
    for name in DECAYING:
        assert curve(30, lr_scheduler=name, lr_min_ratio=0.1, lr_cycles=3)[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("total", "cycles"), [(31, 3), (50, 7), (1001, 10)])
def test_restarts_come_back_to_the_peak(total, cycles):
    factors = curve(total, lr_scheduler="cosine_restarts", lr_cycles=cycles)
    span = total - 1
    for cycle in range(cycles):
        at = -(-cycle * span // cycles)  # the first update of the cycle
        assert factors[at] > 0.9
        assert at == 0 or factors[at - 1] < 0.1
    if span % cycles == 0:
        assert sum(factor == 1.0 for factor in factors) == cycles


def test_one_cycle_of_restarts_is_the_plain_cosine():
    assert curve(40, lr_scheduler="cosine_restarts", lr_warmup=4) == pytest.approx(
        curve(40, lr_scheduler="cosine", lr_warmup=4)
    )


def test_polynomial_power():
    assert curve(11, lr_scheduler="polynomial", lr_power=2)[5] == pytest.approx(0.25)
    assert curve(11, lr_scheduler="polynomial") == pytest.approx(curve(11, lr_scheduler="linear"))


@pytest.mark.parametrize("name", DECAYING)
def test_extending_a_finished_run_gives_a_live_rate(name):
    settings = TrainingConfig(lr_scheduler=name, lr_warmup=0.1)
    assert lr_factor(19, 20, settings) == pytest.approx(0, abs=1e-15)
    assert lr_factor(20, 40, settings) > 0.1


def test_steps_past_the_end_keep_the_end_value():
    settings = TrainingConfig(lr_scheduler="cosine", lr_min_ratio=0.2)
    assert lr_factor(25, 20, settings) == pytest.approx(0.2)


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("name", ["constant", *DECAYING])
@pytest.mark.parametrize("warmup", [0, 0.5, 1, 2, 10])
def test_tiny_runs_stay_in_range(total, name, warmup):
    factors = curve(total, lr_scheduler=name, lr_warmup=warmup)
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[0] > 0


def test_warm_up_longer_than_the_run_is_told():
    assert "213" in schedule_notices(200, TrainingConfig(lr_warmup=213))[0]
    assert schedule_notices(213, TrainingConfig(lr_warmup=213)) == []
