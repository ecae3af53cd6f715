"""Names, shapes and strengths in both layouts (G01, G05), old spellings, and files that must load for ever (golden)."""

import json
from pathlib import Path

import pytest
import torch
from adapter_models import MODELS, SD15, SDXL, sd15_model, sdxl_model, trained
from diffusers.loaders import StableDiffusionLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin
from safetensors.torch import load_file, save_file

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import SourceError
from lora_trainer.export.write import save_adapter
from lora_trainer.layouts import kohya, read_lora

GOLDEN = Path(__file__).parents[1] / "golden"
EVERYTHING = {"lora_rank": 2, "lora_alpha": 4, "lora_targets": "all", "train_text_encoder": True}
SOME = EVERYTHING | {"lora_targets": r"mid_block.*(conv|to_|proj|ff|time_emb)|samplers|blocks\.1\.resnets\.0\.conv"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_key_list(name, layout, tmp_path):
    """The golden lists were read against what A1111, Forge, ComfyUI and diffusers look for; a change breaks users."""
    _, adapter, family = trained(name, **SOME)
    tensors = load_file(save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp16", {}))
    lines = [f"{key} {list(tensors[key].shape)} {tensors[key].dtype}" for key in sorted(tensors)]
    assert lines == (GOLDEN / f"{name}_{layout}.keys.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_old_file_still_loads(name, layout):
    """Written by version 0.1.0 and never to be written again."""
    build, family = MODELS[name]
    adapter = inject(build(), family, ModelConfig(**SOME), 0)
    adapter.load_file(GOLDEN / f"{name}_{layout}_v0.1.0.safetensors")
    norms = json.loads((GOLDEN / f"{name}_v0.1.0.norms.json").read_text(encoding="utf-8"))
    found = {path: float(module.delta().norm()) for path, module in adapter.export().items()}
    assert found == pytest.approx(norms, rel=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_kohya_modules_are_complete(name, tmp_path):
    _, adapter, family = trained(name, conv_rank=4, dora=True, **EVERYTHING)
    tensors = load_file(save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {}))
    modules = {key.partition(".")[0] for key in tensors}
    assert len(modules) == len(adapter.layers)
    for module in modules:
        down, up = tensors[f"{module}.lora_down.weight"], tensors[f"{module}.lora_up.weight"]
        assert down.shape[0] == up.shape[1]
        assert tensors[f"{module}.alpha"].shape == ()
        assert tensors[f"{module}.alpha"] / down.shape[0] == 2
        assert tensors[f"{module}.dora_scale"].shape == (up.shape[0], *[1] * (down.ndim - 1))
    for part, prefix in family.export_prefixes().items():
        assert any(module.startswith(prefix) for module in modules), part
    text = [module for module in modules if module.startswith("lora_te")]
    assert all("_text_model_encoder_layers_" in module for module in text)
    assert not any(word in key for key in tensors for word in ("default", "base_model", "base_layer"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lora_rank": 16, "lora_alpha": 1},
        {"lora_rank": 16, "lora_alpha": 8},
        {"lora_rank": 16, "lora_alpha": 32},
        {"lora_rank": 16, "conv_rank": 4},
        {"lora_rank": 8, "lora_alpha": 4, "rslora": True},
    ],
)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_delta_in_the_file_is_the_live_one(layout, settings, precision, tmp_path):
    """up @ down · alpha / rank, worked out from the raw tensors as a reader does."""
    _, adapter, family = trained("sd15", lora_targets="all", **settings)
    tensors = load_file(save_adapter(adapter, family, tmp_path / "x.safetensors", layout, precision, {}))
    for path, module in adapter.export().items():
        if layout == "kohya":
            name = "lora_unet_" + path.removeprefix("unet.").replace(".", "_")
            down, up = (tensors[f"{name}.lora_{half}.weight"].float().flatten(1) for half in ("down", "up"))
            delta = up @ down * (float(tensors[f"{name}.alpha"]) / down.shape[0])
        else:
            delta = tensors[f"{path}.lora_B.weight"].float().flatten(1) @ tensors[
                f"{path}.lora_A.weight"
            ].float().flatten(1)
        bound = 1e-5 if precision == "fp32" else 1e-3
        assert (delta - module.delta()).norm() <= bound * module.delta().norm(), path


def test_rslora_alpha_is_what_readers_need():
    _, adapter, family = trained("sd15", lora_rank=16, lora_alpha=8, rslora=True)
    tensors = kohya.pack(adapter.export(), family.export_prefixes())
    assert {float(value) for key, value in tensors.items() if key.endswith(".alpha")} == {8 * 16**0.5}


# -- names that other programs write

SGM = {
    "input_blocks_4_1_transformer_blocks_0_attn1_to_q": "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "input_blocks_8_1_proj_in": "down_blocks.2.attentions.1.proj_in",
    "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
    "input_blocks_4_0_skip_connection": "down_blocks.1.resnets.0.conv_shortcut",
    "input_blocks_3_0_op": "down_blocks.0.downsamplers.0.conv",
    "middle_block_0_emb_layers_1": "mid_block.resnets.0.time_emb_proj",
    "middle_block_1_transformer_blocks_9_ff_net_0_proj": "mid_block.attentions.0.transformer_blocks.9.ff.net.0.proj",
    "middle_block_2_out_layers_3": "mid_block.resnets.1.conv2",
    "output_blocks_2_1_transformer_blocks_3_attn2_to_k": "up_blocks.0.attentions.2.transformer_blocks.3.attn2.to_k",
    "output_blocks_2_2_conv": "up_blocks.0.upsamplers.0.conv",
    "output_blocks_8_0_out_layers_3": "up_blocks.2.resnets.2.conv2",
    "time_embed_0": "time_embedding.linear_1",
    "label_emb_0_2": "add_embedding.linear_2",
    "out_2": "conv_out",
}


def test_sgm_names():
    prefixes = SDXL.export_prefixes()
    assert all(f"lora_unet_{k}" in kohya.original_names(f"unet.{path}", prefixes, 2) for k, path in SGM.items())
    assert not kohya.original_names("text_encoder.text_model.x", prefixes, 2)


def test_sgm_names_agree_with_diffusers():
    """diffusers' own reader finds the same place for each block name."""
    config = sdxl_model()["unet"].config
    for name, ours in SGM.items():
        if not name.startswith(("input", "middle", "output")) or name.endswith("conv"):
            continue
        tensors = {
            f"lora_unet_{name}.lora_down.weight": torch.ones(1, 1),
            f"lora_unet_{name}.lora_up.weight": torch.ones(1, 1),
        }
        state, _ = StableDiffusionXLLoraLoaderMixin.lora_state_dict(tensors, unet_config=config)
        theirs = next(key for key in state if "down." in key or "down_lora" in key)
        flat = (
            theirs.replace(".processor", "").replace("to_out_lora", "to_out.0").replace("_lora.", ".").replace(".", "_")
        )
        assert flat.removeprefix("unet_").startswith(ours.replace(".", "_")), name


def test_a_file_of_sd_scripts_for_sdxl_is_read(tmp_path):
    """SDXL as sd-scripts trains it: every UNet name in the original spelling."""
    _, adapter, family = trained("sdxl", lora_rank=4, lora_alpha=2)
    lora = adapter.export()
    to_sgm = {  # the tiny model: two stages of two layers
        "down_blocks_1_attentions_0": "input_blocks_4_1", "down_blocks_1_attentions_1": "input_blocks_5_1",
        "mid_block_attentions_0": "middle_block_1", "up_blocks_0_attentions_0": "output_blocks_0_1",
        "up_blocks_0_attentions_1": "output_blocks_1_1", "up_blocks_0_attentions_2": "output_blocks_2_1",
    }  # fmt: skip
    tensors = {}
    for key, value in kohya.pack(lora, family.export_prefixes()).items():
        place = next(place for place in to_sgm if place in key)
        tensors[key.replace(place, to_sgm[place])] = value
    save_file(tensors, tmp_path / "sgm.safetensors")
    file = read_lora(tmp_path / "sgm.safetensors", list(lora), family.export_prefixes())
    assert not file.strangers
    assert all(torch.equal(file.lora[path].delta(), module.delta()) for path, module in lora.items())


OLD_SPELLINGS = {
    "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.{}.weight": ("down", "up"),
    "unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.{}.weight": ("down", "up"),
    "unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k.lora.{}.weight": ("down", "up"),
    "base_model.model.unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_v.lora_{}.default.weight": ("A", "B"),
    "text_encoder.text_model.encoder.layers.0.self_attn.to_q_lora.{}.weight": ("down", "up"),
    "text_encoder.text_model.encoder.layers.1.self_attn.k_proj.lora_linear_layer.{}.weight": ("down", "up"),
    "text_encoder.encoder.layers.0.mlp.fc1.lora_{}.weight": ("A", "B"),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_k.lora_{}.default.weight": ("A", "B"),
    "base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_v.lora_{}.weight": ("A", "B"),
    "unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_q.lora_{}.weight": ("down", "up"),
}


def test_old_spellings_of_diffusers_and_peft_are_read(tmp_path):
    tensors = {key.format(half): torch.ones(2, 2) for key, halves in OLD_SPELLINGS.items() for half in halves}
    save_file(tensors, tmp_path / "old.safetensors")
    adapter = inject(sd15_model(), SD15, ModelConfig(train_text_encoder=True), 0)
    file = read_lora(tmp_path / "old.safetensors", list(adapter.layers), SD15.export_prefixes())
    assert not file.strangers
    assert len(file.lora) == len(OLD_SPELLINGS)


def test_half_a_pair_is_told_as_such(tmp_path):
    path = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file({f"{path}.lora_A.weight": torch.ones(2, 2)}, tmp_path / "half.safetensors")
    adapter = inject(sd15_model(), SD15, ModelConfig(lora_targets=r"mid_block.*attn1\.to_q$"), 0)
    with pytest.raises(SourceError, match=rf"o arquivo está incompleto: de 1 módulos .*\({path}\)") as caught:
        adapter.read_fitting(tmp_path / "half.safetensors")
    assert "não recebem LoRA aqui" not in str(caught.value)
    assert "faltam no arquivo" not in str(caught.value)


def test_the_config_of_a_diffusers_file_is_heeded(tmp_path):
    """alpha ≠ rank lives in the metadata of files that diffusers itself writes."""
    _, adapter, _ = trained("sd15", lora_rank=4, lora_alpha=8)
    layers = {key.removeprefix("unet."): value for key, value in adapter.state_dict().items()}
    StableDiffusionLoraLoaderMixin.save_lora_weights(
        tmp_path,
        unet_lora_layers=layers,
        unet_lora_adapter_metadata={"r": 4, "lora_alpha": 8, "target_modules": ["to_q"]},
    )
    file = read_lora(tmp_path / "pytorch_lora_weights.safetensors", list(adapter.layers), SD15.export_prefixes())
    assert {module.scale for module in file.lora.values()} == {2.0}
    assert len(file.lora) == len(adapter.layers)


def test_prefixes_by_family():
    path = "text_encoder.encoder.layers.0.mlp.fc1"
    assert kohya.module_name(path, SD15.export_prefixes()) == "lora_te_text_model_encoder_layers_0_mlp_fc1"
    assert kohya.module_name(path, SDXL.export_prefixes()) == "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    second = "text_encoder_2.text_model.encoder.layers.0.mlp.fc1"
    assert kohya.module_name(second, SDXL.export_prefixes()) == "lora_te2_text_model_encoder_layers_0_mlp_fc1"
