"""Rectified flow against diffusers: the path, the shift, the distributions of timesteps, the weights, the sampler."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import compute_loss_weighting_for_sd3

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.diffusion.diffusion import DiffusionFamily, NoisePrediction, make_objective
from lora_trainer.diffusion.rectified_flow import RectifiedFlow, Shift
from lora_trainer.diffusion.sampling import make_flow_scheduler
from lora_trainer.errors import ConfigError

DEV = {
    "num_train_timesteps": 1000, "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15,
    "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip
SD3 = {"num_train_timesteps": 1000, "shift": 3.0}
SHAPE = torch.Size((16, 64, 96))


class Bare(DiffusionFamily):
    title = "X"


Bare.__abstractmethods__ = frozenset()


def family(schedule: dict, prediction_type: str = "flow") -> DiffusionFamily:
    made = Bare()
    made.schedule_config, made.prediction_type = schedule, prediction_type
    return made


def draws(objective: RectifiedFlow, count: int = 4000, shape: torch.Size = SHAPE) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.stack([objective.sample_t(rng, shape) for _ in range(count)]) / 1000


def test_the_path_is_diffusers_and_the_target_its_velocity():
    x0, noise = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    scheduler = FlowMatchEulerDiscreteScheduler()
    timesteps = scheduler.timesteps[[100, 700]]
    x_t, target = RectifiedFlow().corrupt(x0, noise, timesteps)
    assert torch.allclose(x_t, scheduler.scale_noise(x0, timesteps, noise), atol=1e-6)
    step = 1e-3
    later, _ = RectifiedFlow().corrupt(x0, noise, timesteps + 1000 * step)
    assert torch.allclose((later - x_t) / step, target, atol=2e-3)


def test_shift_is_that_of_the_pipeline():
    for height, width in ((32, 32), (64, 64), (64, 96), (128, 128)):
        shift = Shift.of(DEV, 2)
        mu = calculate_shift(height * width // 4)
        assert shift.mu(torch.Size((16, height, width))) == pytest.approx(mu)
        scheduler, t = FlowMatchEulerDiscreteScheduler(**DEV), torch.linspace(0.01, 1, 9)
        assert torch.allclose(shift(t, torch.Size((16, height, width))), scheduler.time_shift(mu, 1.0, t))
    fixed = Shift.of(SD3, 2)
    assert fixed(torch.tensor(0.5), SHAPE).item() == pytest.approx(0.75)
    assert Shift.of(DEV, 2, 1.0)(torch.tensor(0.5), SHAPE).item() == 0.5
    assert Shift.of(SD3, 2, "resolution").fixed is None


def test_distributions_have_the_stated_shape():
    uniform = draws(RectifiedFlow(sampling="uniform"))
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.02)
    assert uniform.min() > 0
    logit = torch.logit(draws(RectifiedFlow(logit_mean=-0.5, logit_std=0.8)))
    assert logit.mean().item() == pytest.approx(-0.5, abs=0.05)
    assert logit.std().item() == pytest.approx(0.8, abs=0.05)
    mode = draws(RectifiedFlow(sampling="mode", mode_scale=1.29))
    middle = ((mode > 0.4) & (mode < 0.6)).float().mean()
    assert middle > 1.3 * ((uniform > 0.4) & (uniform < 0.6)).float().mean()
    assert (mode >= 0).all()
    assert (mode <= 1).all()
    reference = draws(RectifiedFlow(sampling="parabola"))
    for low, high in ((0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.9), (0.9, 1)):
        share = sum(2 - 7.7 * (low + (high - low) * (i + 0.5) / 100 - 0.5) ** 2 for i in range(100)) * (high - low) / 100
        assert ((reference > low) & (reference <= high)).float().mean() == pytest.approx(share / (2 - 7.7 / 12), abs=0.02)
    squeezed = draws(RectifiedFlow(sampling="uniform", timestep_range=(200, 600)), 500)
    assert squeezed.min() >= 0.2
    assert squeezed.max() <= 0.6


def test_larger_pictures_are_drawn_noisier():
    objective = RectifiedFlow(shift=Shift.of(DEV, 2))
    small, large = (draws(objective, 500, torch.Size((16, side, side))).mean() for side in (32, 128))
    assert large > small + 0.05


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_weights_are_diffusers(scheme):
    sigmas = torch.linspace(0.05, 1, 10)
    expected = compute_loss_weighting_for_sd3(scheme, sigmas)
    assert torch.allclose(RectifiedFlow(weighting=scheme).weight(1000 * sigmas), expected, rtol=1e-5)


def test_the_same_example_meets_the_same_noise_in_any_batch():
    objective = RectifiedFlow(shift=Shift.of(DEV, 2))
    one, _ = objective.draw(torch.tensor([7]), torch.Size((1, 4, 8, 8)))
    many, _ = objective.draw(torch.tensor([3, 7]), torch.Size((2, 4, 8, 8)))
    assert one[0] == many[1]


def test_options_make_the_objective_and_foreign_ones_are_refused():
    settings = TrainingConfig(timestep_sampling="mode", timestep_shift=2.0, loss_weighting="cosmap", timestep_min=100)
    made = make_objective(settings, family(DEV))
    assert (made.sampling, made.shift.fixed, made.weighting, made.timestep_range) == ("mode", 2.0, "cosmap", (100, 1000))
    assert make_objective(TrainingConfig(), family(DEV)).shift.fixed is None
    assert make_objective(TrainingConfig(), family(SD3)).shift.fixed == 3.0
    assert make_objective(TrainingConfig(timestep_shift=0), family(SD3)).shift.fixed is None
    assert make_objective(TrainingConfig(timestep_sampling="parabola"), family(DEV)).sampling == "parabola"
    with pytest.raises(ConfigError, match="gama_min_snr"):
        make_objective(TrainingConfig(min_snr_gamma=5.0), family(DEV))
    noise = family({"beta_schedule": "scaled_linear"}, "epsilon")
    with pytest.raises(ConfigError, match="deslocamento_passo_ruido"):
        make_objective(TrainingConfig(timestep_shift=3.0), noise)
    assert isinstance(make_objective(TrainingConfig(), noise), NoisePrediction)


def test_auto_is_the_familys_own():
    """As Chroma's training script draws: a parabola, not shifted."""

    class Other(Bare):
        timestep_sampling, training_shift = "parabola", 1.0

    other = Other()
    other.schedule_config, other.prediction_type = DEV, "flow"
    made = make_objective(TrainingConfig(), other)
    assert (made.sampling, made.shift.fixed) == ("parabola", 1.0)
    asked = make_objective(TrainingConfig(timestep_sampling="logit_normal", timestep_shift=2.0), other)
    assert (asked.sampling, asked.shift.fixed) == ("logit_normal", 2.0)
    assert make_objective(TrainingConfig(), family(DEV)).sampling == "logit_normal"


def test_the_sampler_walks_the_pipelines_levels():
    scheduler = make_flow_scheduler(family(DEV), 4, torch.Size((1, 16, 64, 64)))
    mu = calculate_shift(1024)
    t = torch.linspace(1, 0.25, 4)
    assert torch.allclose(scheduler.sigmas[:4], math.exp(mu) / (math.exp(mu) + (1 / t - 1)))


def test_one_step_with_a_stretched_end_is_a_number():
    scheduler = make_flow_scheduler(family({**DEV, "shift_terminal": 0.02}), 1, torch.Size((1, 16, 64, 64)))
    assert scheduler.sigmas.tolist() == [1.0, 0.0]
