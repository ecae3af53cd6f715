"""What files say about themselves: complete, true, small, and without a name of the user (G05, G10)."""

import json
import os

import pytest
from adapter_models import SD15, SDXL, trained
from safetensors import safe_open

from lora_trainer.adapters.targets import is_wide_conv
from lora_trainer.config.schema import Config
from lora_trainer.export.metadata import CONFIG_KEY, MAX_BYTES, RunFacts, anonymous, capped, describe, network_facts
from lora_trainer.export.write import save_adapter
from lora_trainer.layouts import kohya

FACTS = RunFacts(
    name="gato",
    date="2026-11-29",
    seed=42,
    step=30,
    total_steps=100,
    epoch=3,
    num_images=12,
    tag_frequency={"/home/maria/fotos/10_ohwx gato": {"ohwx": 12, "gato": 9}},
    buckets={(512, 512): 8, (448, 576): 4},
)
CONFIG = Config.model_validate({
    "model": {"base_model": "/home/maria/modelos/sd15.safetensors", "lora_rank": 4, "lora_alpha": 2, "clip_skip": 2,
              "train_text_encoder": True},
    "data": {"data_dir": "C:\\Users\\Maria\\fotos", "trigger": "ohwx", "resolution": 512},
    "training": {"learning_rate": 2e-4, "min_snr_gamma": 5},
    "output": {"dir": "/home/maria/saida", "author": "Ana", "license": "CC-BY-4.0", "description": "Um gato."},
})  # fmt: skip


def test_modelspec():
    found = describe(SD15, CONFIG, FACTS)
    expected = {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "gato",
        "modelspec.author": "Ana",
        "modelspec.license": "CC-BY-4.0",
        "modelspec.description": "Um gato.",
        "modelspec.date": "2026-11-29",
        "modelspec.resolution": "512x512",
        "modelspec.trigger_phrase": "ohwx",
        "modelspec.encoder_layer": "2",
        "modelspec.timestep_range": "0,1000",
    }
    assert {key: value for key, value in found.items() if key.startswith("modelspec.")} == expected
    assert describe(SDXL, CONFIG, FACTS)["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"


def test_training_keys():
    found = describe(SD15, CONFIG, FACTS)
    assert found["ss_output_name"] == "gato"
    assert found["ss_base_model_version"] == "sd_v1"
    assert found["ss_sd_model_name"] == "sd15.safetensors"
    assert found["ss_resolution"] == "(512, 512)"
    assert (found["ss_unet_lr"], found["ss_text_encoder_lr"]) == ("0.0002", "0.0001")
    assert (found["ss_seed"], found["ss_steps"], found["ss_max_train_steps"]) == ("42", "30", "100")
    assert (found["ss_min_snr_gamma"], found["ss_clip_skip"]) == ("5.0", "2")
    assert json.loads(found["ss_tag_frequency"]) == {"10_ohwx gato": {"ohwx": 12, "gato": 9}}
    assert json.loads(found["ss_bucket_info"])["buckets"]["0"] == {"resolution": [448, 576], "count": 4}


def test_trigger_alone_makes_a_tag_table():
    facts = RunFacts(**{**vars(FACTS), "tag_frequency": {}})
    assert json.loads(describe(SD15, CONFIG, facts)["ss_tag_frequency"]) == {"1_ohwx": {"ohwx": 1}}


def test_whole_config_without_the_users_name():
    found = describe(SD15, CONFIG, FACTS)
    config = json.loads(found[CONFIG_KEY])
    assert config["model"]["lora_rank"] == 4
    assert config["training"]["learning_rate"] == 2e-4
    assert config["model"]["base_model"] == "sd15.safetensors"
    assert (config["data"]["data_dir"], config["output"]["dir"]) == ("fotos", "saida")
    assert "maria" not in json.dumps(found, ensure_ascii=False).lower()


@pytest.mark.parametrize(("value", "kept"), [
    ("/home/ana/a.safetensors", "a.safetensors"), ("C:\\Users\\ana\\a b", "a b"), ("\\\\servidor\\ana\\x", "x"),
    ("~/a", "a"), ("../a", "a"), ("runwayml/stable-diffusion-v1-5", "runwayml/stable-diffusion-v1-5"), (3, 3),
    ("um gato, 1/2 corpo", "um gato, 1/2 corpo"), (["/a/b", {"c": "/d/e"}], ["b", {"c": "e"}]),
])  # fmt: skip
def test_anonymous(value, kept):
    assert anonymous(value) == kept


def test_equal_facts_give_equal_metadata_and_no_clock(monkeypatch):
    first = describe(SD15, CONFIG, FACTS)
    monkeypatch.setenv("USER", "outra")
    assert describe(SD15, CONFIG, FACTS) == first
    assert all(isinstance(value, str) for value in first.values())


@pytest.mark.parametrize(
    ("settings", "dim", "alpha", "arguments"),
    [
        ({"lora_rank": 16, "lora_alpha": 8}, "16", "8", {}),
        ({"lora_rank": 16, "lora_alpha": 8, "conv_rank": 4, "lora_targets": "all"}, "16", "8",
         {"conv_dim": "4", "conv_alpha": "2"}),
        ({"lora_rank": 16, "lora_alpha": 8, "rslora": True}, "16", "32", {}),
        ({"lora_rank": 4, "dora": True}, "4", "4", {"dora_wd": "True"}),
    ],
)  # fmt: skip
def test_dim_and_alpha_agree_with_the_tensors(settings, dim, alpha, arguments):
    _, adapter, family = trained("sd15", **settings)
    lora = adapter.export()
    facts = network_facts(lora, "lora", [path for path, layer in adapter.layers.items() if is_wide_conv(layer.base_layer)])
    assert (facts["ss_network_dim"], facts["ss_network_alpha"]) == (dim, alpha)
    assert json.loads(facts["ss_network_args"]) == arguments
    tensors = kohya.pack(lora, family.export_prefixes())
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    assert (tensors[f"{name}.lora_down.weight"].shape[0], tensors[f"{name}.alpha"]) == (int(dim), float(alpha))


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_huge_tag_table_is_capped_with_a_notice(layout, tmp_path, caplog):
    _, adapter, family = trained("sd15", lora_rank=2)
    tags = {f"etiqueta número {i}": 60_000 - i for i in range(60_000)}
    metadata = {**describe(SD15, CONFIG, FACTS), "ss_tag_frequency": {"10_a": tags}}
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp16", metadata)
    assert "etiquetas mais frequentes de 60000" in caplog.text
    with safe_open(str(path), "pt") as file:
        found = file.metadata()
    kept = json.loads(found["ss_tag_frequency"])["10_a"]
    assert 1000 < len(kept) < 60_000
    assert set(kept) == set(list(tags)[: len(kept)])
    assert len(json.dumps(found, ensure_ascii=False).encode()) < 1.01 * MAX_BYTES
    assert CONFIG_KEY in found
    assert os.path.getsize(path) < 2 * MAX_BYTES


def test_other_large_values_are_left_out_by_name():
    entries, notices = capped({"modelspec.title": "x", "modelspec.description": "y" * 2_000_000})
    assert entries == {"modelspec.title": "x"}
    assert "modelspec.description" in notices[0]


def test_small_metadata_is_untouched():
    metadata = describe(SD15, CONFIG, FACTS)
    assert capped(metadata) == (metadata, [])
    assert capped({"a": 1, "b": None, "c": True, "d": ["x"]})[0] == {"a": "1", "c": "True", "d": '["x"]'}
