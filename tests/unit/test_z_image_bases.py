"""What is Z-Image's own: its names, base or Turbo, and the models that look like it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from helpers import bases
from helpers.bases import write_gguf
from safetensors.torch import load_file, save_file

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.rectified_flow import Shift
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.z_image.family import ZImage


def opened(options: dict[str, str], **more: Any) -> ZImage:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, ZImage)
    return family


def renamed(tmp_path: Path, name: str, metadata: dict[str, str] | None = None) -> dict[str, str]:
    """The tiny base under another file name."""
    options = bases.plain("z_image")
    save_file(load_file(options["base_model"]), tmp_path / name, metadata)
    return {**options, "base_model": str(tmp_path / name)}


def test_our_names_are_the_converters():
    transformer = bases.of("z_image").modules()["transformer"]
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(bases.of("z_image").stored_transformer(transformer))
    own = transformer.state_dict()
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)


def test_a_file_with_diffusers_names_is_read_too(tmp_path):
    options, modules = bases.written("z_image", "fp32")
    save_file(modules["transformer"].state_dict(), tmp_path / "base.safetensors")
    family = opened({**options, "base_model": str(tmp_path / "base.safetensors")})
    ours = family.load_model(torch.device("cpu"), torch.float32)["transformer"].state_dict()
    assert all(torch.equal(ours[key], value) for key, value in modules["transformer"].state_dict().items())


def test_the_scheduler_tells_turbo_from_the_base(tmp_path):
    for variant, turbo in (("", False), ("turbo", True)):
        bases.of("z_image", variant).write_folder(tmp_path / f"x{variant}")
        family = opened({"base_model": str(tmp_path / f"x{variant}")})
        assert family.turbo is turbo
        assert family.schedule_config["shift"] == (3.0 if turbo else 6.0)
        assert (family.usual_guidance, family.usual_steps) == ((1.0, 8) if turbo else (5.0, 25))
        assert any("lora_de_treino" in notice for notice in family.notices) is turbo


@pytest.mark.parametrize(
    ("name", "metadata", "turbo", "shift"),
    [
        ("z_image_turbo_bf16.safetensors", None, True, 3.0),
        ("x.safetensors", {"modelspec.title": "My Z-Image Turbo mix"}, True, 3.0),
        ("z_image_de_turbo_v1.safetensors", None, False, 3.0),
        ("z-image-base.safetensors", None, False, 6.0),
    ],
)
def test_what_a_single_file_calls_itself(tmp_path, name, metadata, turbo, shift):
    family = opened(renamed(tmp_path, name, metadata))
    assert (family.turbo, family.schedule_config["shift"]) == (turbo, shift)
    assert not any("não diz se é" in notice for notice in family.notices)


def test_a_file_that_does_not_tell(tmp_path):
    family = opened(renamed(tmp_path, "modelo.safetensors"))
    assert not family.turbo
    assert any("modelo.safetensors não diz se é o Z-Image base ou o Turbo" in notice for notice in family.notices)


def test_with_a_training_lora_turbo_warns_no_more(tmp_path):
    options = renamed(tmp_path, "turbo.safetensors")
    assert any("destilação" in notice for notice in opened(options).notices)
    assert not any("destilação" in notice for notice in opened(options, training_lora="x.safetensors").notices)


def test_lumina_2_is_refused_by_name(tmp_path):
    """Z-Image grew out of it: the same names, but for the tokens that fill up."""
    state = load_file(bases.plain("z_image")["base_model"])
    state = {key: value for key, value in state.items() if not key.endswith("pad_token")}
    save_file(state, tmp_path / "lumina.safetensors")
    write_gguf(tmp_path / "lumina.gguf", state, arch="lumina2")
    for name in ("lumina.safetensors", "lumina.gguf"):
        with pytest.raises(SourceError, match="Lumina 2"):
            opened({"base_model": str(tmp_path / name)})


def test_omni_is_refused_by_name(tmp_path):
    options = bases.plain("z_image")
    state = load_file(options["base_model"])
    extra = {"siglip_pad_token": torch.zeros(1, 96), "siglip_embedder.1.weight": torch.zeros(96, 48)}
    extra |= {"siglip_embedder.0.weight": torch.ones(48), "siglip_embedder.1.bias": torch.zeros(96)}
    extra |= {key.replace("context_", "siglip_"): value.clone() for key, value in state.items() if "context_refiner" in key}
    save_file({**state, **extra}, tmp_path / "omni.safetensors")
    with pytest.raises(SourceError, match="Omni"):
        opened({**options, "base_model": str(tmp_path / "omni.safetensors")})


def test_another_qwen_is_refused(tmp_path):
    from helpers.llm_files import comfy_state, tiny_text_config, whole_model

    for model, width, said in (("qwen3", 64, "largura 64"), ("qwen2_5_vl", 32, r"Qwen2\.5-VL")):
        path = tmp_path / f"{model}.safetensors"
        save_file(comfy_state(whole_model(model, tiny_text_config(model, 300, width=width, layers=3))), path)
        with pytest.raises(SourceError, match=said):
            opened({**bases.plain("z_image"), "text_encoder": str(path)})


def test_noise_levels_are_shifted_for_the_pictures_size():
    """Drawing has a fixed shift; the authors trained with FLUX's line."""
    family = opened(bases.plain("z_image"))
    family.configure(TrainingConfig(), DataConfig())
    objective: Any = family.objective
    assert objective.shift == Shift(None)
    assert objective.sampling == "logit_normal"
    family.configure(TrainingConfig(timestep_shift=2.0), DataConfig())
    objective = family.objective
    assert objective.shift.fixed == 2.0


def test_steps_of_previews_are_the_familys_unless_given(tmp_path):
    from lora_trainer.config.schema import Config
    from lora_trainer.data.preview import ImagePreviews

    family, encoder = opened(renamed(tmp_path, "turbo.safetensors")), type("Encoder", (), {"image_dtype": torch.float32})()
    for given, steps, guidance in (({}, 8, 1.0), ({"steps": 4, "guidance": 2.0}, 4, 2.0)):
        config = Config.model_validate({"model": {}, "samples": given})
        previews: Any = ImagePreviews(family, config, encoder, torch.device("cpu"), None, None)  # type: ignore[arg-type]
        assert (previews.sampling.steps, previews.sampling.guidance) == (steps, guidance)
