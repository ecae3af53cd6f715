"""Where adapters go, how they start, what they hold (E03, E06, H06), and starting from a file (G11)."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_models import MODELS, SD15, forward, sd15_model, sdxl_model, trained
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn

from lora_trainer.adapters import check_base, check_initial_file, check_targets, find_targets, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.diffusion.unet import block_groups
from lora_trainer.errors import ConfigError, SourceError, set_language
from lora_trainer.export.write import save_adapter
from lora_trainer.techniques.quantize_8bit import TECHNIQUE as EightBit


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


def _parts(adapter):
    return {key.partition(".")[0] for key in adapter.named_parameters()}


def _count(adapter):
    return sum(p.numel() for p in adapter.named_parameters().values())


def test_text_encoders_only_when_asked():
    assert _parts(_inject()) == {"unet"}
    assert _parts(_inject(train_text_encoder=True)) == {"unet", "text_encoder"}
    both = inject(sdxl_model(), MODELS["sdxl"][1], ModelConfig(train_text_encoder=True), 0)
    assert _parts(both) == {"unet", "text_encoder", "text_encoder_2"}


def test_a_user_expression_does_not_reach_the_text_encoder():
    assert _parts(_inject(lora_targets="proj", train_text_encoder=False)) == {"unet"}


def test_no_match_shows_layers_with_similar_names():
    with pytest.raises(ConfigError) as error:
        _inject(lora_targets=r"attn2\.to_query")
    assert "nenhuma camada" in str(error.value)
    assert "attnN.to_q" in str(error.value)


def test_broken_expression():
    with pytest.raises(ConfigError, match="expressão regular"):
        _inject(lora_targets="attn(2")


def test_layers_that_no_reader_finds_again_are_refused_at_once():
    with pytest.raises(ConfigError) as error:
        find_targets(sdxl_model(), MODELS["sdxl"][1], ModelConfig(lora_targets="."))
    assert "2 camadas" in error.value.problem
    for name in ("unet.add_embedding.linear_1", "unet.add_embedding.linear_2"):
        assert name in error.value.problem
    assert "formatos: [diffusers]" in error.value.hint


def test_what_the_hint_of_refused_layers_says_works():
    family = MODELS["sdxl"][1]
    everything = find_targets(sdxl_model(), family, ModelConfig(lora_targets="."), ["diffusers"])
    blocks = find_targets(sdxl_model(), family, ModelConfig(lora_targets="_block"))
    assert "unet.add_embedding.linear_1" in everything
    assert set(blocks) < set(everything)
    assert any("mid_block" in name for name in blocks)


@pytest.mark.parametrize("text", [".", "attn(2", r"attn2\.to_query"])
def test_errors_of_targets_name_the_option_in_the_users_language(text):
    for language, where in (("pt", "modelo.alvos_lora"), ("en", "model.lora_targets")):
        set_language(language)
        with pytest.raises(ConfigError) as error:
            find_targets(sdxl_model(), MODELS["sdxl"][1], ModelConfig(lora_targets=text))
        assert error.value.where == where


def test_counts():
    adapter = _inject(lora_rank=4, lora_targets=r"mid_block.*attn1\.to_q$")
    assert (len(adapter.layers), _count(adapter)) == (1, 4 * 32 + 32 * 4)


def test_full_size_sd15_on_meta():
    """128 attention layers; 16 x 1280 x … is 3.19 M parameters at rank 16. No weights are made."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768)
    adapter = inject(nn.ModuleDict({"unet": unet}), SD15, ModelConfig(lora_rank=16), 0)
    assert len(adapter.layers) == 128
    assert _count(adapter) == 3_188_736
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


def test_untrained_until_a_b_matrix_moves():
    adapter = _inject()
    assert adapter.is_untrained()
    with torch.no_grad():
        next(p for key, p in adapter.named_parameters().items() if "lora_B" in key)[0, 0] = 1e-9
    assert not adapter.is_untrained()


# -- the base, before training


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_good_base_passes(dtype, injected):
    model = sdxl_model().to(dtype)
    if injected:
        _inject_everywhere(model)
    assert check_base(model) == []


def _inject_everywhere(model):
    return inject(model, MODELS["sdxl"][1], ModelConfig(lora_targets="all", train_text_encoder=True), 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["unet.mid_block.resnets.0.conv1.weight", "text_encoder.encoder.layers.0.mlp.fc1.bias"])
def test_a_base_with_one_wrong_number_is_refused(name, value):
    model = sdxl_model().to(torch.float16)
    with torch.no_grad():
        dict(model.named_parameters())[name].view(-1)[-1] = value
    _inject_everywhere(model)
    with pytest.raises(SourceError, match="NaN ou infinito") as error:
        check_base(model)
    assert name.partition(".")[0] in error.value.problem
    assert "baixe o modelo de novo" in error.value.hint
    assert error.value.where == "modelo.modelo_base"


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_base_that_is_zeros_is_refused(share):
    model = sdxl_model()
    weights = [p for p in model["unet"].parameters() if p.ndim > 1]
    with torch.no_grad():
        for weight in weights[len(weights) - int(share * len(weights)) :]:
            weight.zero_()
    with pytest.raises(SourceError, match="só têm zeros"):
        check_base(model)


def test_a_single_zero_matrix_is_told():
    model = sdxl_model()
    with torch.no_grad():
        model["unet"].conv_out.weight.zero_()
    (notice,) = check_base(model)
    assert "1 de 123" in notice
    assert "conv_out.weight" in notice


@pytest.mark.parametrize("damage", ["none", "zero", "nan"])
def test_packed_weights_are_looked_at_too(damage):
    real, model = sd15_model(), nn.ModuleDict({"unet": sd15_model()["unet"].to("meta")})
    EightBit().convert(model, block_groups(model))
    for name, layer in model.named_modules():
        source = real.get_submodule(name)
        for key, value in list(source._parameters.items()):
            if value is None:
                continue
            changed = value.detach() * {"none": 1, "zero": 0, "nan": float("nan")}[damage]
            if hasattr(layer, "pack_weight") and key == "weight":
                layer.pack_weight(changed, torch.device("cpu"))
            else:
                layer._parameters[key] = nn.Parameter(changed, requires_grad=False)
    if damage == "none":
        assert check_base(model) == []
        return
    with pytest.raises(SourceError, match={"zero": "só têm zeros", "nan": "NaN"}[damage]):
        check_base(model)


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


# -- the same, before anything is loaded


class Closed:
    """A family whose weights must not be read: only its skeleton may be asked for."""

    def __init__(self, name):
        self.build, self.tiny = MODELS[name]

    def __getattr__(self, name):
        return getattr(self.tiny, name)

    def load_model(self, device, dtype, *, with_text=False, prepare=None):
        assert device.type == "meta"
        with torch.device("meta"):
            model = self.build()
        return model if with_text else nn.ModuleDict({"unet": model["unet"]})


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", MODELS)
def test_a_fitting_initial_file_passes(name, layout, dora, tmp_path):
    _, adapter, family = trained(name, dora=dora, **SETTINGS)
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", layout, "fp16", {})
    check_initial_file(path, Closed(name), ModelConfig(dora=dora, **SETTINGS))
    check_targets(Closed(name), ModelConfig(dora=dora, initial_lora=path, **SETTINGS))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora_rank": 8}, "rank 4 no arquivo, 8"),
        ({"dora": True}, "sem DoRA no arquivo"),
        ({"train_text_encoder": False}, "não recebem LoRA aqui"),
        ({"lora_targets": "attention"}, "não recebem LoRA aqui"),
    ],
)
def test_an_initial_file_that_does_not_fit_is_found_before_loading(changes, told, tmp_path):
    _, adapter, family = trained("sd15", **SETTINGS)
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", "kohya", "fp16", family.metadata())
    with pytest.raises(SourceError) as error:
        check_initial_file(path, Closed("sd15"), ModelConfig(**SETTINGS | changes))
    assert told in error.value.problem
    with pytest.raises(SourceError, match="stable-diffusion-v1"):
        check_initial_file(path, Closed("sdxl"), ModelConfig(**SETTINGS))


DAMAGES = ["pickle", "renamed pickle", "truncated", "left over", "nan", "inf", "alpha", "scalar", "matrices", "config"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_initial_file_is_found_before_loading(damage, tmp_path):
    _, adapter, family = trained("sd15", **SETTINGS)
    layout = "diffusers" if damage == "config" else "kohya"
    path = save_adapter(adapter, family, tmp_path / "a.safetensors", layout, "fp32", {})
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}  # not views of the file
    raw, metadata = path.read_bytes(), {}
    key = next(key for key in tensors if "up" in key or "lora_B" in key)
    if damage == "pickle":
        path = path.with_suffix(".pt")
        torch.save(tensors, path)
    elif damage == "renamed pickle":
        torch.save(tensors, path)
    elif damage == "truncated":
        path.write_bytes(raw[:-100])
    elif damage == "left over":
        path.write_bytes(raw + b"x" * 100)
    else:
        if damage in ("nan", "inf"):
            tensors[key].view(-1)[0] = float(damage)
        elif damage == "alpha":
            tensors[next(key for key in tensors if key.endswith("alpha"))] = torch.ones(2)
        elif damage == "scalar":
            tensors[key.replace("up", "down")] = torch.tensor(1.0)
        elif damage == "matrices":
            tensors[key] = tensors[key][:, :2].contiguous()
        else:
            metadata = {"lora_adapter_metadata": "{"}
        save_file(tensors, path, metadata=metadata)
    with pytest.raises(SourceError):
        check_initial_file(path, Closed("sd15"), ModelConfig(**SETTINGS))


def test_an_absent_initial_file_names_the_option():
    for language, where in (("pt", "modelo.lora_inicial"), ("en", "model.initial_lora")):
        set_language(language)
        with pytest.raises(SourceError) as error:
            _inject().load_file(Path("absent.safetensors"))
        assert error.value.where == where


def test_targets_are_checked_before_loading():
    check_targets(Closed("sdxl"), ModelConfig())
    with pytest.raises(ConfigError, match="add_embedding"):
        check_targets(Closed("sdxl"), ModelConfig(lora_targets="."))
    with pytest.raises(ConfigError, match="nenhuma camada"):
        check_targets(Closed("sdxl"), ModelConfig(lora_targets="to_query"))


@pytest.mark.parametrize(("formats", "told"), [(("kohya",), 1), (("kohya", "diffusers"), 0), (("diffusers",), 0)])
def test_dora_is_told_of_where_a_kohya_file_stands_alone(formats, told):
    """Not where `auto` means the diffusers layout, as in transformer families."""
    settings = ModelConfig(dora=True)
    assert [" DoRA" in notice for notice in check_targets(Closed("sd15"), settings, formats)] == [True] * told
