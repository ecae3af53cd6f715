"""LoHa and LoKr: names and sizes in files, proof by reading back, going on from them, and what is refused by name."""

import json

import pytest
import torch
from adapter_models import MODELS, SD15, forward, perturb, sd15_model, trained
from safetensors.torch import load_file, safe_open, save_file

from lora_trainer.adapters import check_base, check_targets, find_targets, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import ConfigError, DivergedError, MachineError, SourceError
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.layouts.lycoris import LycorisModule, kind_of
from lora_trainer.layouts.lycoris_files import read_lycoris

Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
BOTH = {"lora_targets": "all", "train_text_encoder": True, "lora_rank": 4, "lora_alpha": 2}
CASES = {
    "loha": {"adapter_kind": "loha", **BOTH},
    "loha, conv rank": {"adapter_kind": "loha", **BOTH, "conv_rank": 2, "conv_alpha": 3},
    "lokr": {"adapter_kind": "lokr", "lokr_factor": 2, **BOTH},
    "lokr, near the root": {"adapter_kind": "lokr", **BOTH, "lora_rank": 1},
    "lokr, rslora": {"adapter_kind": "lokr", "lokr_factor": 2, **BOTH, "rslora": True},
}


def saved(name, case, tmp_path, precision="fp32", **metadata):
    model, adapter, family = trained(name, **CASES[case])
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", precision, metadata)
    return model, adapter, family, path


def test_nothing_changes_at_the_start():
    base = sd15_model()
    with torch.no_grad():
        expected = forward(base)
        for case in CASES.values():
            model = sd15_model()
            adapter = inject(model, SD15, ModelConfig(**case), 0)
            assert adapter.is_untrained()
            assert torch.equal(forward(model), expected)
            perturb(adapter)
            assert not adapter.is_untrained()
            assert (forward(model) - expected).abs().max() > 1e-3
            with adapter.disabled():
                assert torch.equal(forward(model), expected)


def test_the_start_depends_on_seed_and_path_alone():
    settings = ModelConfig(adapter_kind="loha", lora_rank=4)
    torch.manual_seed(1)
    one = inject(sd15_model(), SD15, settings, 5).state_dict()
    torch.manual_seed(2)
    other = inject(sd15_model().half(), SD15, settings.model_copy(update={"lora_targets": "all"}), 5).state_dict()
    assert one.keys() < other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert not torch.equal(next(iter(inject(sd15_model(), SD15, settings, 6).state_dict().values())), next(iter(one.values())))
    assert {p.dtype for p in inject(sd15_model().half(), SD15, settings, 5).named_parameters().values()} == {torch.float32}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_proved_by_reading_it_back(name, case, tmp_path):
    model, adapter, family, path = saved(name, case, tmp_path)
    with torch.no_grad():
        before = forward(model)
    state = adapter.state_dict()
    found = verify(model, adapter, family, path, forward)
    assert found.output_difference < 1e-4
    assert found.effect > 1e-3
    assert found.num_modules == len(adapter.layers)
    assert "releitura própria" in found.reader
    with torch.no_grad():
        assert torch.equal(forward(model), before)
    assert all(torch.equal(value, state[key]) for key, value in adapter.state_dict().items())
    assert {key for key, p in model.named_parameters() if p.requires_grad} == set(adapter.named_parameters())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("case", ["loha", "lokr"])
def test_a_file_in_16_bits(case, precision, tmp_path):
    model, adapter, family, path = saved("sd15", case, tmp_path, precision)
    assert verify(model, adapter, family, path, forward).output_difference < 0.02


@pytest.mark.parametrize("case", ["loha", "lokr"])
def test_a_damaged_file_does_not_pass(case, tmp_path):
    model, adapter, family, path = saved("sd15", case, tmp_path)
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith(("hada_w1_b", "lokr_w1")))
    save_file({**tensors, key: tensors[key] * 1.1}, path)
    with pytest.raises(MachineError, match="não é o LoRA"):
        verify(model, adapter, family, path, forward)


def test_names_and_sizes_are_lycoris():
    _, adapter, _ = trained("sd15", **CASES["loha, conv rank"])
    conv = adapter.modules()["unet.mid_block.resnets.0.conv1"]
    assert {name: tuple(f.shape) for name, f in conv.factors.items()} == {
        "hada_w1_a": (32, 2), "hada_w1_b": (2, 288), "hada_w2_a": (32, 2), "hada_w2_b": (2, 288),
    }  # fmt: skip
    assert conv.scale == pytest.approx(1.5)
    modules = trained("sd15", **CASES["lokr"])[1].modules()
    conv, linear = modules["unet.mid_block.resnets.0.conv1"], modules[Q]
    assert {name: tuple(f.shape) for name, f in conv.factors.items()} == {
        "lokr_w1": (2, 2), "lokr_w2_a": (16, 4), "lokr_w2_b": (4, 16 * 9),
    }  # fmt: skip
    assert {name: tuple(f.shape) for name, f in linear.factors.items()} == {
        "lokr_w1": (2, 2), "lokr_w2_a": (16, 4), "lokr_w2_b": (4, 16),
    }  # fmt: skip


@pytest.mark.parametrize("case", ["loha", "lokr"])
def test_what_the_file_says(case, tmp_path):
    *_, path = saved("sdxl", case, tmp_path)
    with safe_open(path, "pt") as file:
        metadata, keys = file.metadata(), set(file.keys())
    assert metadata["ss_network_module"] == "lycoris.kohya"
    assert json.loads(metadata["ss_network_args"]) == {"algo": case, "conv_dim": "4", "conv_alpha": "2"}
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "2")
    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    factors = {"loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), "lokr": ("lokr_w1", "lokr_w2_a", "lokr_w2_b")}
    assert {key for key in keys if key.startswith(f"{stem}.")} == {f"{stem}.{n}" for n in (*factors[case], "alpha")}
    assert any(key.startswith("lora_te1_text_model_encoder_layers_0_mlp_fc1.") for key in keys)
    assert any(key.startswith("lora_te2_text_model_encoder_layers_0_mlp_fc1.") for key in keys)
    assert float(load_file(path)[f"{stem}.alpha"]) == 2.0
    assert kind_of(keys) == case


def test_alpha_without_effect_is_told():
    class Skeleton:
        def __getattr__(self, name):
            return getattr(SD15, name)

        def load_model(self, device, dtype, *, with_text=False):
            return sd15_model()

    settings = ModelConfig(adapter_kind="lokr", lora_rank=16, lora_alpha=8)
    (notice,) = check_targets(Skeleton(), settings)
    assert "camadas o rank já dá uma matriz inteira" in notice
    assert check_targets(Skeleton(), settings.model_copy(update={"lora_alpha": None})) == []
    assert check_targets(Skeleton(), settings.model_copy(update={"lora_rank": 1, "lokr_factor": 2})) == []


def test_a_whole_lokr_has_no_scale(tmp_path):
    """Readers take 1 where neither factor is low-rank, whatever its alpha."""
    model, adapter, family = trained("sd15", adapter_kind="lokr", lora_rank=512, lora_alpha=64)
    assert set(adapter.scalings().values()) == {1.0}
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    assert {key.rpartition(".")[2] for key in load_file(path)} == {"lokr_w1", "lokr_w2", "alpha"}
    assert verify(model, adapter, family, path, forward).effect > 0


@pytest.mark.parametrize("case", CASES)
def test_going_on_from_a_file(case, tmp_path):
    model, _, family, path = saved("sdxl", case, tmp_path)
    fresh = MODELS["sdxl"][0]()
    other = inject(fresh, family, ModelConfig(**{**CASES[case], "lora_alpha": 7}), 5)
    other.load_file(path)
    with torch.no_grad():
        assert torch.allclose(forward(fresh), forward(model), atol=1e-5)


def test_going_on_from_others_spellings(tmp_path):
    """SimpleTuner's `lycoris_…`, and the original's names, under which sd-scripts trains SDXL."""
    _, adapter, family, path = saved("sd15", "lokr", tmp_path)
    unet = {key.replace("lora_unet_", "lycoris_"): tensor for key, tensor in load_file(path).items()}
    save_file(unet, path)
    assert read_lycoris(path, list(adapter.layers), family.export_prefixes(), 1, "lokr").lora.keys() == adapter.layers.keys()
    _, adapter, family = trained("sd15", adapter_kind="loha", lora_rank=2, lora_targets="mid_block.*attn1.to_q$")
    path = save_adapter(adapter, family, path, "kohya", "fp32", {})
    sgm = {key.replace("mid_block_attentions_0", "middle_block_1"): tensor for key, tensor in load_file(path).items()}
    save_file(sgm, path)
    assert not read_lycoris(path, list(adapter.layers), family.export_prefixes(), 1, "loha").strangers


@pytest.mark.parametrize("start", ["diffusion_model.", "base_model.model.", "", "lycoris_transformer_", "lora_transformer_"])
def test_going_on_from_a_transformer_under_others_names(start, tmp_path):
    """ai-toolkit's, peft's and OneTrainer's words for the one model they know."""
    rest, name = "layers.0.attention.to_q", "lokr_w1"
    stem = rest.replace(".", "_") if start.endswith("_") else rest
    save_file({f"{start}{stem}.{name}": torch.ones(2, 2), f"{start}{stem}.lokr_w2": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    file = read_lycoris(tmp_path / "x.safetensors", [f"transformer.{rest}"], {"transformer": "lora_unet"}, 2, "lokr")
    assert list(file.lora) == [f"transformer.{rest}"]
    assert not file.strangers


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"adapter_kind": "lokr", "lokr_factor": 2}, "é um LoHa, não um LoKr"),
        ({"adapter_kind": "lora"}, "é um LoHa, não um LoRA"),
        ({"lora_rank": 2}, "hada_w1_b 4x"),
        ({"lora_targets": "attention"}, "não recebem LoRA aqui"),
        ({"train_text_encoder": False}, "não recebem LoRA aqui"),
    ],
)
def test_a_file_that_does_not_fit(asked, told, tmp_path):
    *_, path = saved("sd15", "loha", tmp_path)
    other = inject(sd15_model(), SD15, ModelConfig(**{**CASES["loha"], **asked}), 0)
    with pytest.raises(SourceError) as error:
        other.load_file(path)
    assert told in str(error.value)
    if "é um LoHa" in told:
        assert "tipo_adaptador: loha" in error.value.hint


def test_a_plain_lora_is_no_loha(tmp_path):
    _, adapter, family = trained("sd15")
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    with pytest.raises(SourceError, match="é um LoRA, não um LoHa"):
        inject(sd15_model(), SD15, ModelConfig(adapter_kind="loha"), 0).load_file(path)


@pytest.mark.parametrize("mark", ["lokr_t2", "dora_scale", "cut", "nan"])
def test_forms_that_are_not_continued(mark, tmp_path):
    _, adapter, _, path = saved("sd15", "lokr", tmp_path)
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    key = next(key for key in tensors if key.endswith("lokr_w1"))
    if mark == "nan":
        tensors[key][0, 0] = float("nan")
    elif mark == "cut":
        del tensors[key]
    else:
        tensors[f"{key.rpartition('.')[0]}.{mark}"] = torch.zeros(2, 2)
    save_file(tensors, path)
    told = {"lokr_t2": "Tucker", "dora_scale": "DoRA", "nan": "NaN", "cut": "no arquivo"}[mark]
    with pytest.raises(SourceError, match=told):
        adapter.load_file(path)


def test_what_is_not_finite_is_not_written(tmp_path):
    _, adapter, family = trained("sd15", **CASES["loha"])
    with torch.no_grad():
        next(iter(adapter.named_parameters().values()))[0, 0] = float("inf")
    with pytest.raises(DivergedError):
        save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    assert not list(tmp_path.iterdir())


def test_formats_and_families_without_them_are_refused_by_name():
    for kind, title in (("loha", "LoHa"), ("lokr", "LoKr")):
        settings = ModelConfig(adapter_kind=kind)
        with pytest.raises(ConfigError, match=f"não lê {title}"):
            find_targets(sd15_model(), SD15, settings, ["kohya", "diffusers"])
        with pytest.raises(ConfigError, match=f"{title} é só para modelos de imagem"):
            find_targets(sd15_model(), SD15, settings, ["peft"])


def test_the_base_check_looks_through_the_layers():
    model, _, _ = trained("sd15", **CASES["loha"])
    assert check_base(model) == []


def test_foreign_forms_are_computed_right():
    """Both factors of low rank, and a factor with a kernel: forms that LyCORIS can write."""
    torch.manual_seed(0)
    factors = {"lokr_w1_a": torch.randn(4, 2), "lokr_w1_b": torch.randn(2, 3), "lokr_w2": torch.randn(5, 6, 3, 3)}
    change = torch.kron((factors["lokr_w1_a"] @ factors["lokr_w1_b"])[:, :, None, None], factors["lokr_w2"])
    assert torch.allclose(LycorisModule(factors, 0.5, 2).delta().view(change.shape), 0.5 * change)
