"""H01, H08, prior weights, masks: what one example costs, and that its company in a batch does not matter."""

import math

import pytest
import torch
from diffusers import DDPMScheduler
from tiny_unets import SCHEDULE, TinyFamily, make_batch, make_model, stack, trainable

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.diffusion.diffusion import NoisePrediction, make_objective
from lora_trainer.diffusion.objective import alphas_cumprod
from lora_trainer.errors import ConfigError
from lora_trainer.seam.family import Batch

SNRS = torch.tensor([1e4, 5.0, 1.0, 1e-3, 0.0], dtype=torch.float64)


def objective(**changes: object) -> NoisePrediction:
    return NoisePrediction(**{"alphas_cumprod": alphas_cumprod(SCHEDULE, False), **changes})


def weights_at_snrs(**changes: object) -> torch.Tensor:
    return objective(alphas_cumprod=SNRS / (1 + SNRS), **changes).weight(torch.arange(5))


class Answer(TinyFamily):
    """Predicts a given tensor, so that the loss can be worked out by hand."""

    def __init__(self, answer: torch.Tensor, **changes: object) -> None:
        super().__init__("sd15")
        self.objective, self.answer = objective(**changes), answer

    def predict(self, model, x_t, timesteps, batch):
        return self.answer


# -- H08 and the other weightings


def test_h08_min_snr_epsilon():
    expected = [5e-4, 1, 1, 1, 1]  # min(snr, 5) / snr; its limit at 0
    assert weights_at_snrs(min_snr_gamma=5.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_h08_min_snr_v():
    expected = (SNRS.clamp(max=5) / (SNRS + 1)).tolist()
    found = weights_at_snrs(min_snr_gamma=5.0, prediction_type="v_prediction").tolist()
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[-1] == 0


def test_debiased():
    assert weights_at_snrs(debiased=True)[:4].tolist() == pytest.approx((SNRS[:4] ** -0.5).tolist(), rel=1e-6)
    v = weights_at_snrs(debiased=True, prediction_type="v_prediction")
    assert v.tolist() == pytest.approx((SNRS.sqrt() / (SNRS + 1)).tolist(), rel=1e-6, abs=1e-9)


def test_no_weighting_is_one():
    assert weights_at_snrs().tolist() == [1] * 5


@pytest.mark.parametrize("changes", [{"min_snr_gamma": 5.0}, {"debiased": True}])
def test_epsilon_and_v_cost_the_same(changes):
    """The weights for v are those for epsilon seen through the change of variables: equal losses for equal errors."""
    rng = torch.Generator().manual_seed(0)
    x0, noise, wrong = torch.randn(3, 5, 4, 2, 2, dtype=torch.float64, generator=rng).unbind()
    t = torch.tensor([1, 100, 500, 800, 998])
    losses = []
    for kind in ("epsilon", "v_prediction"):
        each = objective(prediction_type=kind, alphas_cumprod=alphas_cumprod(SCHEDULE, False).double(), **changes)
        x_t, target = each.corrupt(x0, noise, t)
        kept = each.alphas_cumprod[t].view(-1, 1, 1, 1)
        epsilon = noise + wrong
        implied_x0 = (x_t - (1 - kept).sqrt() * epsilon) / kept.sqrt()
        answer = epsilon if kind == "epsilon" else kept.sqrt() * epsilon - (1 - kept).sqrt() * implied_x0
        losses.append(each.error(answer, target) * each.weight(t))
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=1e-6)


# -- noising against diffusers


@pytest.mark.parametrize("rescaled", [False, True])
def test_corruption_equals_diffusers(rescaled):
    scheduler = DDPMScheduler(**SCHEDULE, rescale_betas_zero_snr=rescaled)
    x0, noise = torch.randn(2, 4, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()
    t = torch.tensor([0, 1, 500, 999])
    each = objective(alphas_cumprod=alphas_cumprod(SCHEDULE, rescaled))
    x_t, target = each.corrupt(x0, noise, t)
    assert torch.allclose(x_t, scheduler.add_noise(x0, noise, t), atol=1e-6)
    assert target is noise
    v = objective(alphas_cumprod=alphas_cumprod(SCHEDULE, rescaled), prediction_type="v_prediction")
    assert torch.allclose(v.corrupt(x0, noise, t)[1], scheduler.get_velocity(x0, noise, t), atol=1e-6)


def test_zero_terminal_snr_reaches_pure_noise():
    plain, rescaled = alphas_cumprod(SCHEDULE, False), alphas_cumprod(SCHEDULE, True)
    assert plain[-1] > 0.004
    assert rescaled[-1] == 0
    assert rescaled[0] == pytest.approx(plain[0].item(), rel=1e-5)
    v = objective(alphas_cumprod=rescaled, prediction_type="v_prediction", debiased=True)
    assert v.weight(torch.tensor([999])).isfinite().all()


def test_a_base_that_was_trained_rescaled_stays_so():
    assert alphas_cumprod({**SCHEDULE, "rescale_betas_zero_snr": True, "clip_sample": False}, False)[-1] == 0


def test_zero_terminal_snr_is_refused_for_epsilon_and_seen_by_samplers():
    with pytest.raises(ConfigError, match="snr_terminal_zero"):
        TinyFamily("sd15", zero_terminal_snr=True)
    assert TinyFamily("sd15", "v_prediction", zero_terminal_snr=True).zero_terminal_snr
    assert not TinyFamily("sd15", "v_prediction").zero_terminal_snr


# -- timesteps and noise


def test_timesteps_stay_in_range_and_cover_it():
    family = TinyFamily("sd15", timestep_min=200, timestep_max=205)
    timesteps, _ = family.objective.draw(torch.arange(200), torch.Size((200, 1, 1, 1)))
    assert set(timesteps.tolist()) == {200, 201, 202, 203, 204}


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match="passo_ruido_minimo"):
        TinyFamily("sd15", timestep_min=500, timestep_max=500)


def test_noise_is_white_and_offset_adds_to_each_channels_mean():
    seeds, shape = torch.arange(300), torch.Size((300, 4, 16, 16))
    _, white = objective().draw(seeds, shape)
    _, shifted = objective(noise_offset=0.5).draw(seeds, shape)
    assert white.mean().item() == pytest.approx(0, abs=0.01)
    assert white.std().item() == pytest.approx(1, abs=0.01)
    assert white.mean((2, 3)).std().item() == pytest.approx(1 / 16, rel=0.1)
    assert shifted.mean((2, 3)).std().item() == pytest.approx(math.hypot(0.5, 1 / 16), rel=0.1)
    assert torch.allclose((shifted - white).std((2, 3)), torch.zeros(()), atol=1e-5)


def test_an_examples_noise_depends_on_its_seed_alone():
    t4, n4 = objective(noise_offset=0.1).draw(torch.tensor([7, 8, 9, 2**62]), torch.Size((4, 4, 8, 8)))
    t1, n1 = objective(noise_offset=0.1).draw(torch.tensor([9]), torch.Size((1, 4, 8, 8)))
    assert torch.equal(n4[2:3], n1)
    assert t4[2] == t1[0]
    assert not torch.equal(n4[0], n4[1])
    torch.manual_seed(123)
    assert torch.equal(objective(noise_offset=0.1).draw(torch.tensor([9]), torch.Size((1, 4, 8, 8)))[1], n1)


def test_drawing_leaves_global_random_numbers_alone():
    before = torch.get_rng_state()
    objective(noise_offset=0.1).draw(torch.arange(3), torch.Size((3, 4, 8, 8)))
    assert torch.equal(torch.get_rng_state(), before)


# -- the loss


def by_hand(batch: Batch, each: NoisePrediction) -> torch.Tensor:
    """Targets of a batch, worked out from the seeds."""
    timesteps, noise = each.draw(batch["seeds"], batch["latents"].shape)
    return each.corrupt(batch["latents"], noise, timesteps)[1]


def test_loss_is_the_sum_over_examples_of_the_mean_squared_error():
    batch = make_batch(3)
    family = Answer(torch.zeros(3, 4, 8, 8, dtype=torch.bfloat16))
    loss = family.loss(None, batch)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(batch, family.objective).square().mean((1, 2, 3)).sum().item())
    assert family.num_terms(batch) == 3


def test_prior_weight_scales_its_example_only():
    batch = make_batch(2)
    family = Answer(torch.zeros(2, 4, 8, 8))
    each = by_hand(batch, family.objective).square().mean((1, 2, 3))
    batch["weight"] = torch.tensor([1.0, 0.25])
    assert family.loss(None, batch).item() == pytest.approx((each[0] + 0.25 * each[1]).item())


@pytest.mark.parametrize("name", ["huber", "smooth_l1"])
def test_robust_losses_bound_large_errors(name):
    each = objective(loss=name, huber_delta=0.1)
    error = torch.tensor([0.01, 0.05, 2.0]).view(3, 1, 1, 1)
    found = each.error(error, torch.zeros_like(error)).tolist()
    scale = 1 if name == "huber" else 10  # divided by delta
    assert found == pytest.approx([scale * 0.01**2, scale * 0.05**2, scale * 0.1 * (2 * 2 - 0.1)])


def test_mask_counts_only_where_it_is_white():
    batch = make_batch(1)
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., :2] = 1
    batch["mask"] = mask
    answer = torch.zeros(1, 4, 8, 8)
    family = Answer(answer)
    inside = by_hand(batch, family.objective)[..., :2].square().mean().item()
    assert family.loss(None, batch).item() == pytest.approx(inside)
    answer[..., 2:] = 100.0  # whatever is answered under the black part
    assert family.loss(None, batch).item() == pytest.approx(inside)


def test_unmasked_weight_lets_the_rest_in():
    batch = make_batch(1)
    batch["mask"] = torch.zeros(1, 1, 8, 8)
    batch["mask"][..., :4] = 1
    family = Answer(torch.zeros(1, 4, 8, 8), unmasked_weight=0.25)
    squares = by_hand(batch, family.objective).square()
    expected = (squares[..., :4].mean() + 0.25 * squares[..., 4:].mean()) / 1.25
    assert family.loss(None, batch).item() == pytest.approx(expected.item())


def test_white_mask_changes_nothing_and_black_mask_costs_nothing():
    batch = make_batch(2)
    family = Answer(torch.zeros(2, 4, 8, 8))
    plain = family.loss(None, batch).item()
    batch["mask"] = torch.ones(2, 1, 8, 8)
    assert family.loss(None, batch).item() == pytest.approx(plain, rel=1e-6)
    batch["mask"] = torch.zeros(2, 1, 8, 8)
    family.answer.requires_grad_()
    loss = family.loss(None, batch)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(family.answer.grad, torch.zeros(2, 4, 8, 8))


def test_make_objective_carries_every_option():
    settings = TrainingConfig(
        min_snr_gamma=3, noise_offset=0.05, loss="huber", huber_delta=0.2, timestep_min=10, timestep_max=900
    )
    made = make_objective(settings, TinyFamily("sdxl", "v_prediction"), unmasked_weight=0.1)
    assert (made.min_snr_gamma, made.noise_offset, made.loss, made.huber_delta) == (3, 0.05, "huber", 0.2)
    assert (made.timestep_range, made.unmasked_weight, made.prediction_type) == ((10, 900), 0.1, "v_prediction")
    assert make_objective(TrainingConfig(debiased=True), TinyFamily("sd15")).debiased


# -- H01: accumulation equals a large batch

SETTINGS = {
    "plain": {},
    "everything": {"min_snr_gamma": 5, "noise_offset": 0.1, "loss": "huber"},
}


def gradients(kind: str, sizes: tuple[int, ...], training: dict[str, object]) -> tuple[torch.Tensor, float]:
    """Gradient and loss of four examples in micro-batches of the given sizes: count, then divide."""
    family, model = TinyFamily(kind, **training), make_model(kind)
    batch = make_batch(4)
    batch["weight"] = torch.tensor([1.0, 0.5, 1.0, 2.0])
    batch["mask"] = torch.stack([torch.linspace(0, 1 + i, 64).clamp(max=1).view(1, 8, 8) for i in range(4)])
    examples = [{name: value[i] for name, value in batch.items()} for i in range(4)]
    start, window = 0, []
    for size in sizes:
        window.append(stack(examples[start : start + size]))
        start += size
    terms, total = sum(family.num_terms(b) for b in window), 0.0
    for micro in window:
        loss = family.loss(model, micro) / terms
        loss.backward()
        total += loss.item()
    return torch.cat([p.grad.flatten() for p in trainable(model).values()]), total


@pytest.mark.parametrize("training", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_h01_accumulation_equals_a_large_batch(kind, training):
    whole, loss = gradients(kind, (4,), training)
    assert whole.norm() > 0
    for sizes in ((2, 2), (1, 1, 1, 1), (3, 1)):
        parts, split_loss = gradients(kind, sizes, training)
        assert (parts - whole).norm() / whole.norm() < 1e-5
        assert split_loss == pytest.approx(loss, rel=1e-5)
