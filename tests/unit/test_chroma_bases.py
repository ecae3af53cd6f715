"""Chroma's bases: names as diffusers' converter has them, what is refused by name, what stays in 16 bits."""

from typing import Any

import pytest
import torch
from diffusers import ChromaTransformer2DModel
from helpers.bases import of, plain, weights, write_gguf, written
from helpers.flux_converter import converted
from safetensors.torch import load_file, save_file

from lora_trainer import adapters
from lora_trainer.bases.parts import build_t5
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.chroma.family import Chroma
from lora_trainer.techniques.quantize_4bit import Quantize4bit

CPU = torch.device("cpu")


def opened(options: dict[str, str], **more: Any) -> Chroma:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, Chroma)
    return family


def test_our_names_are_the_converters():
    transformer = of("chroma").modules()["transformer"]
    theirs = converted("chroma", of("chroma").stored_transformer(transformer))
    own = transformer.state_dict()
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)


def test_the_sizes_of_all_networks_are_read_off_the_files():
    family = opened(plain("chroma"))
    expected = of("chroma").configs()["transformer"]
    assert family.components["transformer"].config == expected


@pytest.mark.parametrize("arch", ["chroma", "flux"])
def test_gguf_files_name_either_architecture(tmp_path, arch):
    options, modules = written("chroma", "fp32")
    write_gguf(tmp_path / "x.gguf", of("chroma").stored_transformer(modules["transformer"]), arch=arch)
    ours = weights(opened({**options, "base_model": str(tmp_path / "x.gguf")}).load_model(CPU, torch.float32)["transformer"])
    own = modules["transformer"].state_dict()
    assert all((ours[key] - value).abs().max() <= 0.01 * value.abs().max() for key, value in own.items())


def test_a_file_with_diffusers_names(tmp_path):
    options, modules = written("chroma", "fp32")
    save_file(modules["transformer"].state_dict(), tmp_path / "x.safetensors")
    family = opened({**options, "base_model": str(tmp_path / "x.safetensors")})
    assert family.components["transformer"].config == opened(options).components["transformer"].config
    ours = family.load_model(CPU, torch.float32)["transformer"].state_dict()
    assert all(torch.equal(ours[key], value) for key, value in modules["transformer"].state_dict().items())


def test_radiance_is_refused_by_name(tmp_path):
    state = load_file(plain("chroma")["base_model"])
    state |= {"img_in_patch.weight": torch.zeros(1), "nerf_blocks.0.param_generator.weight": torch.zeros(1)}
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="Radiance") as error:
        opened({**plain("chroma"), "base_model": str(tmp_path / "x.safetensors")})
    assert "Chroma1-HD" in str(error.value)
    write_gguf(tmp_path / "x.gguf", state, arch="chroma")
    with pytest.raises(SourceError, match="Radiance"):
        opened({**plain("chroma"), "base_model": str(tmp_path / "x.gguf")})


def test_t5_given_as_vae_is_told_its_place():
    options = plain("chroma")
    with pytest.raises(SourceError, match=r"cabe em modelo\.codificador_texto$"):
        opened({**options, "vae": options["text_encoder"]})


def test_parts_of_another_model_are_refused_by_their_width(tmp_path):
    options, modules = written("chroma", "fp32")
    config = modules["text_encoder"].config.to_dict() | {"d_model": 64}
    state = build_t5(config).state_dict()
    state["shared.weight"] = state.pop("encoder.embed_tokens.weight")
    save_file(state, tmp_path / "t5.safetensors")
    with pytest.raises(SourceError, match="largura 64"):
        opened({**options, "text_encoder": str(tmp_path / "t5.safetensors")})


def test_the_network_of_the_modulations_stays_in_16_bits():
    """It is in no block, so nothing quantises or streams it, and no LoRA adapts it."""
    family = opened(plain("chroma"))
    model = family.load_model(CPU, torch.bfloat16, prepare=lambda m: Quantize4bit().convert(m, family.blocks(m)))
    transformer: Any = model["transformer"]
    assert transformer.transformer_blocks[0].ff.net[2].packing.title == "nf4"
    inside = [m for m in transformer.distilled_guidance_layer.modules() if isinstance(m, torch.nn.Linear)]
    assert len(inside) == 6
    assert all(layer.weight.dtype is torch.bfloat16 for layer in inside)
    found = adapters.find_targets(model, family, ModelConfig(lora_targets="all"), ("diffusers", "kohya"))
    assert len(found) == 2 * (8 + 4) + 2 * (3 + 2)
    assert not any("distilled_guidance_layer" in path for path in found)


def test_the_table_of_modulations_is_there_without_a_file():
    """A buffer that is in no checkpoint, made anew as diffusers makes it."""
    family = opened(plain("chroma"))
    loaded: Any = family.load_model(CPU, torch.float32)["transformer"]
    whole = ChromaTransformer2DModel.from_config(family.components["transformer"].config)
    assert torch.equal(loaded.time_text_embed.mod_proj, whole.time_text_embed.mod_proj)


def test_noise_levels_are_drawn_as_its_training_script_draws_them():
    family = opened(plain("chroma"))
    family.configure(TrainingConfig(), DataConfig())
    assert (family.objective.sampling, family.objective.shift.fixed) == ("parabola", 1.0)
    assert opened(plain("chroma")).schedule_config["use_dynamic_shifting"], "previews are shifted as FLUX's are"
