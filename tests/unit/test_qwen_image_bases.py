"""What is special about Qwen-Image's bases: names held against diffusers' converters, variants refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from helpers import bases
from helpers.bases import write_gguf
from helpers.llm_files import tiny_text_config, whole_model, write_llm_gguf
from safetensors.torch import load_file, save_file

from lora_trainer.config.schema import DataConfig, ModelConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.qwen_image.family import QwenImage
from lora_trainer.files.sources import open_source

CPU = torch.device("cpu")
OPTIONS, MODULES = bases.written("qwen_image", "fp32")


def opened(options: dict[str, str], **more: Any) -> QwenImage:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, QwenImage)
    return family


def test_the_vaes_names_are_the_converters():
    vae = bases.of("qwen_image").modules()["vae"]
    theirs = convert_wan_vae_to_diffusers(bases.of("qwen_image").stored_vae(vae))
    own = vae.state_dict()
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)


def test_a_vae_file_with_diffusers_names(tmp_path):
    state = MODULES["vae"].state_dict()
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "vae.safetensors")
    family = opened(OPTIONS, vae=str(tmp_path / "vae.safetensors"))
    loaded = family.load_vae(CPU, torch.float32).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert family.components["vae"].config == opened(OPTIONS).components["vae"].config


def test_another_familys_vae_is_refused(tmp_path):
    """FLUX.1's has as many channels."""
    flux = bases.plain("flux")["vae"]
    with pytest.raises(SourceError, match="VAE Qwen-Image"):
        opened(OPTIONS, vae=flux)
    assert open_source(OPTIONS["vae"]).looks_like().name == "vae_qwen"


def test_a_smaller_qwen_is_refused_by_its_width(tmp_path):
    small = whole_model("qwen2_5_vl", tiny_text_config("qwen2_5_vl", 600, width=48))
    write_llm_gguf(tmp_path / "x.gguf", "qwen2_5_vl", small, "F32")
    with pytest.raises(SourceError, match="largura 48, mas o transformador espera 32"):
        opened(OPTIONS, text_encoder=str(tmp_path / "x.gguf"))


def test_the_text_encoder_may_be_a_gguf(tmp_path):
    whole = whole_model("qwen2_5_vl", tiny_text_config("qwen2_5_vl", MODULES["text_encoder"].config.vocab_size))
    write_llm_gguf(tmp_path / "x.gguf", "qwen2_5_vl", whole)
    encoders = opened(OPTIONS, text_encoder=str(tmp_path / "x.gguf")).load_text_encoders(CPU, torch.float32)
    [ours] = opened(OPTIONS).encode_text(encoders, ["a cat"])
    [theirs] = opened(OPTIONS).encode_text(opened(OPTIONS).load_text_encoders(CPU, torch.float32), ["a cat"])
    assert (ours["prompt_embeds"] - theirs["prompt_embeds"]).norm() < 0.05 * theirs["prompt_embeds"].norm()


@pytest.mark.parametrize("flag", ["__index_timestep_zero__", "time_text_embed.addition_t_embedding.weight"])
def test_files_of_variants_are_refused(tmp_path, flag):
    state = load_file(OPTIONS["base_model"])
    width = state["img_in.weight"].shape[0]
    save_file({**state, flag: torch.zeros(2, width)}, tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="Edit"):
        opened(OPTIONS, base_model=str(tmp_path / "x.safetensors"))


def test_folders_of_variants_are_refused_by_name(tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(bases.written("qwen_image", "folder")[0]["base_model"], folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    for name in ("QwenImageEditPlusPipeline", "QwenImageLayeredPipeline"):
        (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": name}), encoding="utf-8")
        with pytest.raises(SourceError, match=name.removesuffix("Pipeline")) as error:
            opened({"base_model": str(folder)})
        assert "Qwen-Image-2512" in str(error.value)


def test_qwen_image_2_1_is_another_family():
    with pytest.raises(SourceError, match=r"um Qwen-Image 2\.1\n.*qwen_image_21"):
        resolve(ModelConfig(**bases.plain("qwen_image_21"), family="qwen_image"), DataConfig())


def test_a_vae_in_the_base_slot_is_told_its_place():
    with pytest.raises(SourceError, match=r"modelo\.vae"):
        resolve(ModelConfig(base_model=OPTIONS["vae"]), DataConfig())
    with pytest.raises(SourceError, match=r"modelo\.codificador_texto"):
        resolve(ModelConfig(base_model=OPTIONS["text_encoder"]), DataConfig())


def test_a_controlnet_is_no_base(tmp_path):
    state = load_file(OPTIONS["base_model"]) | {"controlnet_blocks.0.weight": torch.zeros(2, 2)}
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="ControlNet"):
        resolve(ModelConfig(base_model=str(tmp_path / "x.safetensors")), DataConfig())


def test_gguf_names_its_architecture(tmp_path):
    write_gguf(Path(tmp_path / "x.gguf"), dict(MODULES["transformer"].state_dict()), arch="qwen_image")
    assert open_source(str(tmp_path / "x.gguf")).looks_like().name == "qwen_image"


def test_longer_captions_than_the_limit_are_cut_where_the_pipeline_cuts():
    family = opened(OPTIONS)
    [example] = family.tokenize(["a cat " * 900])
    assert len(example["input_ids"]) == 34 + family.tokens
    assert bool(example["attention_mask"].all())
