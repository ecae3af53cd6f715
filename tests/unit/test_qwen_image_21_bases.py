"""What is special about Qwen-Image 2.1's bases: fused MLPs, Wan's names, what looks alike, Turbo; LoRA files of its people."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bases
from helpers.bases import write_gguf
from helpers.llm_files import comfy_state, tiny_text_config, whole_model, write_llm_gguf
from safetensors.torch import load_file, save_file

from lora_trainer import adapters
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.errors import ConfigError, MachineError, SourceError
from lora_trainer.families import resolve
from lora_trainer.families.qwen_image_21 import vae as qwen21_vae
from lora_trainer.families.qwen_image_21.family import QwenImage21
from lora_trainer.families.qwen_image_21.variant import TURBO_LEVELS
from lora_trainer.files.sources import open_source
from lora_trainer.layouts.read import read_lora
from lora_trainer.seam.family import Sampling

CPU = torch.device("cpu")
BASE = bases.of("qwen_image_21")
OPTIONS, MODULES = bases.written("qwen_image_21", "fp32")


def opened(options: dict[str, str], **more: Any) -> QwenImage21:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, QwenImage21)
    return family


# -- single files


def test_the_vaes_names_are_wans():
    pairs = {
        "quant_conv.weight": "conv1.weight",
        "decoder.conv_out.weight": "decoder.head.2.weight",
        "decoder.mid_block.attentions.0.to_qkv.weight": "decoder.middle.1.to_qkv.weight",
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": "encoder.downsamples.1.downsamples.0.shortcut.weight",
        "encoder.down_blocks.0.downsampler.resample.1.weight": "encoder.downsamples.0.downsamples.2.resample.1.weight",
        "decoder.up_blocks.1.resnets.2.norm2.gamma": "decoder.upsamples.1.upsamples.2.residual.3.gamma",
        "decoder.up_blocks.0.upsampler.time_conv.bias": "decoder.upsamples.0.upsamples.3.time_conv.bias",
    }
    assert {name: qwen21_vae.original(name, 2) for name in pairs} == pairs
    assert BASE.stored_vae(MODULES["vae"])["decoder.head.2.weight"].shape == (4, 6, 1, 3, 3)


def test_a_vae_without_its_layers_for_time_or_with_diffusers_names(tmp_path):
    """One frame has no use for them."""
    named = dict(MODULES["vae"].state_dict())
    for number, state in enumerate((named, {k: v for k, v in BASE.stored_vae(MODULES["vae"]).items() if "time_conv" not in k})):
        path = tmp_path / f"{number}.safetensors"
        save_file({key: value.clone() for key, value in state.items()}, path)
        family = opened(OPTIONS, vae=str(path))
        loaded = family.load_vae(CPU, torch.float32).state_dict()
        assert not any("time_conv" in key for key in loaded)
        assert all(torch.equal(value, named[key]) for key, value in loaded.items())
        assert family.components["vae"].config == opened(OPTIONS).components["vae"].config


def test_a_transformer_with_diffusers_names(tmp_path):
    state = {key: value.clone() for key, value in MODULES["transformer"].state_dict().items()}
    save_file(state, tmp_path / "x.safetensors")
    family = opened(OPTIONS, base_model=str(tmp_path / "x.safetensors"))
    assert family.components["transformer"].config == opened(OPTIONS).components["transformer"].config
    loaded = family.load_model(CPU, torch.float32)["transformer"].state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_gate_stands_above_value():
    state, whole = BASE.stored_transformer(MODULES["transformer"]), dict(MODULES["transformer"].state_dict())
    fused = load_file(OPTIONS["base_model"])["transformer_blocks.1.img_mlp.gate_up.weight"]
    assert torch.equal(fused, state["transformer_blocks.1.img_mlp.gate_up.weight"])
    loaded: Any = opened(OPTIONS).load_model(CPU, torch.float32)["transformer"]
    mlp = loaded.transformer_blocks[1].img_mlp
    assert torch.equal(mlp.gate_layer.weight, fused[: len(fused) // 2])
    assert torch.equal(mlp.gate_layer.weight, whole["transformer_blocks.1.img_mlp.gate_layer.weight"])


@pytest.mark.parametrize("arch", ["qwen_image", "qwen_image21", "flux"])
def test_gguf_is_told_by_its_tensors(tmp_path, arch):
    """Those that are about name all kinds of architecture, or none."""
    write_gguf(tmp_path / "x.gguf", BASE.stored_transformer(MODULES["transformer"]), arch=arch)
    assert open_source(str(tmp_path / "x.gguf")).looks_like().name == "qwen_image_21"


# -- what looks alike


def test_the_two_qwen_images_are_told_apart():
    first = bases.plain("qwen_image")
    assert open_source(first["vae"]).looks_like().name == "vae_qwen"
    assert open_source(OPTIONS["vae"]).looks_like().name == "vae_qwen_21"
    with pytest.raises(SourceError, match=r"VAE do Qwen-Image ou do Wan, não o VAE do Qwen-Image 2\.1"):
        opened(OPTIONS, vae=first["vae"])
    with pytest.raises(SourceError, match=r"Qwen2\.5-VL"):
        opened(OPTIONS, text_encoder=first["text_encoder"])
    with pytest.raises(SourceError, match="escreva familia: qwen_image_21"):
        resolve(ModelConfig(**OPTIONS, family="qwen_image"), DataConfig())
    with pytest.raises(SourceError, match=r"modelo\.vae"):
        resolve(ModelConfig(base_model=OPTIONS["vae"]), DataConfig())


def test_folders_of_parts(tmp_path):
    base = Path(bases.written("qwen_image_21", "folder")[0]["base_model"])
    assert open_source(str(base)).looks_like().name == "qwen_image_21"
    assert open_source(str(base / "transformer")).looks_like().name == "qwen_image_21"
    assert open_source(str(base / "vae")).looks_like().name == "vae_qwen_21"
    assert open_source(str(base / "text_encoder")).looks_like().name == "vision_language"
    parts = {"text_encoder": str(base / "text_encoder"), "vae": str(base / "vae"), "tokenizer": str(base / "processor")}
    family = opened({"base_model": str(base / "transformer"), **parts})
    assert family.load_model(CPU, torch.float32)
    assert not family.notices


def test_qwen3_is_not_qwen3_vl(tmp_path):
    """The same shapes: refused where the file says what it is, else told."""
    text = tiny_text_config("qwen3", MODULES["text_encoder"].config.vocab_size)
    qwen3 = whole_model("qwen3", text)
    write_llm_gguf(tmp_path / "x.gguf", "qwen3", qwen3)
    with pytest.raises(SourceError, match="Qwen3, não o Qwen3-VL"):
        opened(OPTIONS, text_encoder=str(tmp_path / "x.gguf"))
    qwen3.save_pretrained(tmp_path / "folder")
    with pytest.raises(SourceError, match="qwen3, não o Qwen3-VL"):
        opened(OPTIONS, text_encoder=str(tmp_path / "folder"))
    save_file({key: value.detach().clone() for key, value in comfy_state(qwen3).items()}, tmp_path / "x.safetensors")
    assert any("Qwen3-8B" in notice for notice in opened(OPTIONS, text_encoder=str(tmp_path / "x.safetensors")).notices)
    assert not opened(OPTIONS).notices


def test_the_text_encoder_may_be_a_gguf(tmp_path):
    whole = whole_model("qwen3_vl", tiny_text_config("qwen3_vl", MODULES["text_encoder"].config.vocab_size))
    write_llm_gguf(tmp_path / "x.gguf", "qwen3_vl", whole)
    family = opened(OPTIONS, text_encoder=str(tmp_path / "x.gguf"))
    [ours] = family.encode_text(family.load_text_encoders(CPU, torch.float32), ["a cat"])
    [theirs] = opened(OPTIONS).encode_text(opened(OPTIONS).load_text_encoders(CPU, torch.float32), ["a cat"])
    assert (ours["prompt_embeds"] - theirs["prompt_embeds"]).norm() < 0.05 * theirs["prompt_embeds"].norm()


def test_variants_and_old_libraries_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / "base"
    shutil.copytree(bases.written("qwen_image_21", "folder")[0]["base_model"], folder)
    config = json.loads((folder / "transformer" / "config.json").read_text("utf-8"))
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"causal_condition": False}), encoding="utf-8")
    with pytest.raises(SourceError, match=r"variante do Qwen-Image 2\.1"):
        opened({"base_model": str(folder)})
    monkeypatch.setitem(__import__("sys").modules, "lora_trainer.families.qwen_image_21.names", None)
    with pytest.raises(MachineError, match="pip install -U diffusers"):
        opened(OPTIONS)


# -- Turbo


def test_turbo_is_told_by_its_noise_levels_or_its_name(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bases.written("qwen_image_21", "folder")[0]["base_model"], folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.5]}), encoding="utf-8")
    by_levels = opened({"base_model": str(folder)})
    assert by_levels.levels == (1.0, 0.5)
    shutil.copy(OPTIONS["base_model"], tmp_path / "Qwen-Image-2.1-Turbo.safetensors")
    by_name = opened(OPTIONS, base_model=str(tmp_path / "Qwen-Image-2.1-Turbo.safetensors"))
    assert (by_name.levels, by_name.usual_steps) == (TURBO_LEVELS, 8)
    for family in (by_levels, by_name):
        assert any("desfaz a destilação" in notice for notice in family.notices)
    assert opened(OPTIONS).levels is None


@torch.no_grad()
def test_turbo_is_drawn_with_its_own_levels(tmp_path):
    """As the pipeline draws it, whose scheduler shifts nothing."""
    folder = tmp_path / "base"
    shutil.copytree(bases.written("qwen_image_21", "folder")[0]["base_model"], folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"sample_sigmas": [1.0, 0.9, 0.4]}), encoding="utf-8")
    place = folder / "scheduler" / "scheduler_config.json"
    unshifted = {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None}
    place.write_text(json.dumps(json.loads(place.read_text("utf-8")) | unshifted), encoding="utf-8")
    pipeline, family = bases.pipeline("qwen_image_21", folder), opened({"base_model": str(folder)})
    family.configure(TrainingConfig(), DataConfig())
    pipeline.set_progress_bar_config(disable=True)
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), ["a cat"])
    sampling = Sampling((64, 96), steps=family.usual_steps, guidance=family.usual_guidance, seed=5)
    ours = family.sample(family.load_model(CPU, torch.float32), [example], example, sampling)
    noise = torch.randn(ours.shape[1:], generator=torch.Generator().manual_seed(5))[None].flatten(2).transpose(1, 2)
    theirs = pipeline(prompt="a cat", width=64, height=96, latents=noise, output_type="latent").images
    theirs = theirs.transpose(1, 2).unflatten(2, (6, 4))
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


# -- LoRA files


@pytest.mark.parametrize("spelling", ["musubi-tuner", "ai-toolkit"])
def test_loras_of_the_fused_mlp_are_read(tmp_path, spelling):
    """With one `down` for gate and value: each gets it, and its rows of `up`."""
    family = opened(OPTIONS)
    model = family.load_model(torch.device("meta"), torch.float32)
    paths = adapters.find_targets(model, family, ModelConfig(lora_targets="attention+mlp"), family.formats)
    down, up = torch.randn(4, 64), torch.randn(2 * 192, 4)
    name, roles = {
        "musubi-tuner": ("lora_unet_transformer_blocks_0_img_mlp_gate_up", ("lora_down", "lora_up")),
        "ai-toolkit": ("diffusion_model.transformer_blocks.0.img_mlp.gate_up", ("lora_A", "lora_B")),
    }[spelling]
    path = tmp_path / "x.safetensors"
    save_file({f"{name}.{role}.weight": value for role, value in zip(roles, (down, up), strict=True)}, path)
    lora = read_lora(path, list(paths), family.export_prefixes(), 0, family.kohya_slots).lora
    start = "transformer.transformer_blocks.0.img_mlp"
    assert set(lora) == {f"{start}.gate_layer", f"{start}.proj"}
    assert torch.allclose(lora[f"{start}.gate_layer"].delta(), (up @ down)[:192], atol=1e-5)
    assert torch.allclose(lora[f"{start}.proj"].delta(), (up @ down)[192:], atol=1e-5)


def test_dora_has_no_place_in_a_fused_file():
    with pytest.raises(ConfigError, match="DoRA"):
        adapters.check_targets(opened(OPTIONS), ModelConfig(**OPTIONS, dora=True), ("kohya",))
