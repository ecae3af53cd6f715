"""Where adapters go, how they start, what they hold (E03, E06, H06), and starting from a file (G11)."""

import random

import numpy as np
import pytest
import torch
from adapter_models import MODELS, SD15, forward, sd15_model, sdxl_model, trained
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.export.write import save_adapter


def _inject(model=None, seed=0, **settings):
    return inject(model or sd15_model(), SD15, ModelConfig(**settings), seed)


# -- what is adapted


def test_targets_by_preset():
    attention = _inject(lora_targets="attention")
    mlp = _inject(lora_targets="attention+mlp")
    everything = _inject(lora_targets="all")
    assert all(".attn" in path for path in attention.layers)
    assert attention.layers.keys() < mlp.layers.keys() < everything.layers.keys()
    assert any("resnets.0.conv1" in path for path in everything.layers)


def test_targets_by_regular_expression():
    adapter = _inject(lora_targets=r"mid_block.*attn2\.to_[qk]$")
    assert len(adapter.layers) == 2


def test_text_encoders_only_when_asked():
    assert set(_inject().parameters_by_part()) == {"unet"}
    assert set(_inject(train_text_encoder=True).parameters_by_part()) == {"unet", "text_encoder"}
    both = inject(sdxl_model(), MODELS["sdxl"][1], ModelConfig(train_text_encoder=True), 0)
    assert set(both.parameters_by_part()) == {"unet", "text_encoder", "text_encoder_2"}


def test_a_user_expression_does_not_reach_the_text_encoder():
    assert set(_inject(lora_targets="proj", train_text_encoder=False).parameters_by_part()) == {"unet"}


def test_no_match_shows_layers_with_similar_names():
    with pytest.raises(ConfigError) as error:
        _inject(lora_targets=r"attn2\.to_query")
    assert "nenhuma camada" in str(error.value)
    assert "attnN.to_q" in str(error.value)


def test_broken_expression():
    with pytest.raises(ConfigError, match="expressão regular"):
        _inject(lora_targets="attn(2")


def test_counts():
    adapter = _inject(lora_rank=4, lora_targets=r"mid_block.*attn1\.to_q$")
    assert (adapter.num_modules, adapter.num_parameters) == (1, 4 * 32 + 32 * 4)


def test_full_size_sd15_on_meta():
    """128 attention layers; 16 x 1280 x … is 3.19 M parameters at rank 16. No weights are made."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768)
    adapter = inject(nn.ModuleDict({"unet": unet}), SD15, ModelConfig(lora_rank=16), 0)
    assert adapter.num_modules == 128
    assert adapter.num_parameters == 3_188_736
    assert all(p.is_meta and p.requires_grad for p in adapter.named_parameters().values())


# -- strength


@pytest.mark.parametrize(
    ("settings", "linear", "conv"),
    [
        ({"lora_rank": 8}, 1.0, 1.0),
        ({"lora_rank": 8, "lora_alpha": 4}, 0.5, 0.5),
        ({"lora_rank": 8, "lora_alpha": 4, "conv_rank": 2}, 0.5, 0.5),
        ({"lora_rank": 8, "lora_alpha": 4, "conv_rank": 2, "conv_alpha": 4}, 0.5, 2.0),
        ({"lora_rank": 16, "lora_alpha": 8, "rslora": True}, 2.0, 2.0),
        ({"lora_rank": 16, "lora_alpha": 8, "rslora": True, "conv_rank": 4}, 2.0, 2.0),
    ],
)
def test_scalings(settings, linear, conv):
    adapter = _inject(lora_targets="all", **settings)
    scalings = adapter.scalings()
    assert scalings["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"] == pytest.approx(linear)
    assert scalings["unet.mid_block.resnets.0.conv1"] == pytest.approx(conv)
    assert scalings["unet.mid_block.attentions.0.proj_in"] == pytest.approx(linear)  # a 1x1 convolution
    assert adapter.export()["unet.mid_block.resnets.0.conv1"].rank == settings.get("conv_rank", settings["lora_rank"])


def test_alpha_scales_the_effect_linearly():
    one = trained("sd15", lora_rank=4, lora_alpha=4)[1].export()
    three = trained("sd15", lora_rank=4, lora_alpha=12)[1].export()
    assert all(torch.allclose(three[path].delta(), 3 * one[path].delta()) for path in one)


# -- start


def test_same_seed_same_start_whatever_ran_before():
    first = _inject(seed=42).state_dict()
    torch.rand(17), random.random(), np.random.rand()
    second = _inject(seed=42, train_text_encoder=True).state_dict()
    other = _inject(seed=43).state_dict()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    starts = [key for key in first if "lora_A" in key]
    assert not any(torch.equal(first[key], other[key]) for key in starts)
    assert len({float(first[key].flatten()[0]) for key in starts}) == len(starts)


def test_start_does_not_depend_on_the_dtype_of_the_base():
    full, half = _inject(seed=1).state_dict(), _inject(sd15_model().to(torch.bfloat16), seed=1).state_dict()
    assert all(torch.equal(value, half[key]) for key, value in full.items())


def test_inject_leaves_the_random_state_alone():
    model = sd15_model()
    before = torch.random.get_rng_state()
    _inject(model, lora_targets="all", dora=True)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("settings", [{}, {"dora": True, "lora_targets": "all"}, {"rslora": True}])
def test_a_fresh_adapter_changes_nothing(settings):
    model = sd15_model()
    with torch.no_grad():
        base = forward(model)
        _inject(model, train_text_encoder=True, **settings)
        assert torch.allclose(forward(model), base, atol=1e-5)


def test_a_bound_of_the_start():
    weight = _inject().state_dict()["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight"]
    assert 0.9 / 32**0.5 < weight.abs().max() <= 1 / 32**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_trainable_is_float32_and_the_rest_is_frozen(dtype):
    model = sd15_model().to(dtype)
    adapter = _inject(model, lora_targets="all", dora=True, train_text_encoder=True)
    ours = {id(p) for p in adapter.named_parameters().values()}
    assert {id(p) for p in model.parameters() if p.requires_grad} == ours
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert all(p.dtype == dtype for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_updates_do_not_vanish(dtype):
    """50 steps at 1e-5: in half precision 0.03 + 1e-5 is 0.03 (E06)."""
    model = sd15_model().to(dtype)
    adapter = _inject(model, lora_targets=r"mid_block.*attn")
    start = adapter.state_dict()
    optimizer = torch.optim.SGD(adapter.named_parameters().values(), lr=1e-5)
    for _ in range(50):
        for parameter in adapter.named_parameters().values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for key, value in adapter.state_dict().items():
        assert torch.allclose(start[key] - value, torch.full_like(value, 5e-4), rtol=0.05), key


# -- holding


def test_disabled_is_the_base():
    model, adapter, _ = trained("sd15", train_text_encoder=True)
    with torch.no_grad():
        base, ours = forward(sd15_model()), forward(model)
        with adapter.disabled():
            assert torch.equal(forward(model), base)
        assert torch.equal(forward(model), ours)
    assert not torch.allclose(base, ours)
    assert all(p.requires_grad for p in adapter.named_parameters().values())


def test_disabled_ends_after_an_error():
    model, adapter, _ = trained("sd15")
    with torch.no_grad():
        ours = forward(model)
        with pytest.raises(ZeroDivisionError), adapter.disabled():
            raise ZeroDivisionError
        assert torch.equal(forward(model), ours)


def test_state_round_trip():
    _, adapter, _ = trained("sd15", dora=True, lora_targets="all", train_text_encoder=True)
    other = _inject(seed=9, dora=True, lora_targets="all", train_text_encoder=True)
    state = adapter.state_dict()
    other.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    state[next(iter(state))].zero_()
    assert bool(next(iter(adapter.state_dict().values())).any()), "state_dict must hand out copies"


def test_state_of_another_adapter_is_refused():
    with pytest.raises(SourceError, match="outro LoRA"):
        _inject(lora_rank=4).load_state_dict(_inject(lora_rank=8).state_dict())
    with pytest.raises(SourceError, match="outro LoRA"):
        _inject(lora_targets="all").load_state_dict(_inject().state_dict())


def test_is_finite():
    _, adapter, _ = trained("sd15")
    assert adapter.is_finite()
    with torch.no_grad():
        next(iter(adapter.named_parameters().values()))[0, 0] = float("inf")
    assert not adapter.is_finite()


# -- starting from a file

SETTINGS = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "all", "train_text_encoder": True}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", MODELS)
def test_initial_lora(name, layout, dora, tmp_path):
    model, adapter, family = trained(name, dora=dora, **SETTINGS)
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", layout, "fp32", {})
    fresh = MODELS[name][0]()
    other = inject(fresh, family, ModelConfig(dora=dora, **SETTINGS | {"lora_alpha": 2}), 5)
    other.load_file(path)
    with torch.no_grad():
        assert torch.allclose(forward(fresh), forward(model), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_initial_lora_of_any_float_type_is_trained_in_float32(dtype, tmp_path):
    _, adapter, family = trained("sd15", lora_rank=4)
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", "kohya", "fp32", {})
    save_file({key: value.to(dtype) for key, value in load_file(path).items()}, path)
    other = _inject(lora_rank=4, seed=8)
    other.load_file(path)
    assert {p.dtype for p in other.named_parameters().values()} == {torch.float32}
    state = adapter.state_dict()
    assert all(torch.equal(value, state[key].to(dtype).float()) for key, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("saved", "asked", "told"),
    [
        ({"lora_rank": 8}, {"lora_rank": 4}, "rank 8 no arquivo, 4 na configuração"),
        ({"lora_targets": "all"}, {}, "módulos do arquivo não recebem LoRA aqui"),
        ({}, {"lora_targets": "all"}, "faltam no arquivo"),
        ({"train_text_encoder": True}, {}, "não recebem LoRA aqui (lora_te_text_model"),
        ({"dora": True}, {}, "com DoRA no arquivo, sem DoRA na configuração"),
    ],
)
def test_initial_lora_that_does_not_fit(saved, asked, told, tmp_path):
    _, adapter, family = trained("sd15", **saved)
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", "kohya", "fp16", family.metadata())
    other = _inject(**asked)
    before = other.state_dict()
    with pytest.raises(SourceError) as error:
        other.load_file(path)
    assert told in str(error.value)
    assert "size mismatch" not in str(error.value)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


def test_initial_lora_of_another_family_names_it(tmp_path):
    _, adapter, family = trained("sdxl")
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", "kohya", "fp16", family.metadata())
    with pytest.raises(SourceError, match="stable-diffusion-xl"):
        _inject().load_file(path)


def test_initial_lora_that_is_no_lora(tmp_path):
    cases = {
        "checkpoint": {"model.diffusion_model.out.2.weight": torch.zeros(4, 4)},
        "loha": {"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": torch.zeros(4, 4)},
        "nan": {"lora_unet_x.lora_down.weight": torch.full((4, 4), float("nan"))},
    }
    told = {"checkpoint": "não tem camadas LoRA", "loha": "LoHa", "nan": "NaN"}
    for name, tensors in cases.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(SourceError, match=told[name]):
            _inject().load_file(tmp_path / f"{name}.safetensors")
    (tmp_path / "broken.safetensors").write_bytes((tmp_path / "loha.safetensors").read_bytes()[:60])
    (tmp_path / "old.pt").write_bytes(b"PK\x03\x04")
    for name in ("broken.safetensors", "old.pt", "absent.safetensors"):
        with pytest.raises(SourceError):
            _inject().load_file(tmp_path / name)
