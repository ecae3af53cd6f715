"""Tiny Z-Image bases with random weights, in every layout people have: diffusers folder, ComfyUI's separate files, all in one."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, ZImageTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.bases import architecture
from lora_trainer.families.z_image import names

from . import flux_bases, originals
from .flux_bases import randomised, to_fp8, write_gguf
from .llm_files import body_of, comfy_state, tiny_text_config, whole_model, write_qwen_tokenizer
from .original_checkpoint import original_names

WIDTH, HEADS = 96, 3
KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "ZImagePipeline"
NARROW = {"dim": 384, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3, "n_refiner_layers": 1}
"""The released transformer at a tenth of its width, with fewer blocks."""
SHIFTS = {"base": 6.0, "turbo": 3.0}


def tiny_configs(vocabulary: int) -> dict[str, dict[str, Any]]:
    transformer = {
        "dim": WIDTH, "n_heads": HEADS, "n_kv_heads": HEADS, "n_layers": 2, "n_refiner_layers": 2, "cap_feat_dim": 32,
        "axes_dims": [8, 12, 12],
    }  # fmt: skip
    return {
        "transformer": architecture.shipped("z_image", "transformer") | transformer,
        "text_encoder": tiny_text_config("qwen3", vocabulary, layers=3),
        "vae": flux_bases.tiny_configs(60, 60)["vae"],
    }


def random_modules(configs: dict[str, dict[str, Any]]) -> dict[str, nn.Module]:
    """With the whole language model as `text_encoder`."""
    torch.manual_seed(0)
    made = {
        "transformer": ZImageTransformer2DModel.from_config(configs["transformer"]).eval(),
        "vae": AutoencoderKL.from_config(configs["vae"]).eval(),
    }
    return {**randomised(made), "text_encoder": whole_model("qwen3", configs["text_encoder"])}


def original_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The transformer under its own names, as z_image_turbo_bf16.safetensors has them."""
    return originals.original_state(transformer, names.Z_IMAGE)


def parts(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """As the family names and cuts them."""
    return {**modules, "text_encoder": body_of(modules["text_encoder"])}


def write_folder(path: Path, variant: str = "base") -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    modules = random_modules(tiny_configs(write_qwen_tokenizer(path / "tokenizer")))
    for name, module in modules.items():
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    scheduler = architecture.shipped("z_image", "scheduler") | {"shift": SHIFTS[variant]}
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": "ZImagePipeline", "transformer": ["diffusers", "ZImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return parts(modules)


def write_files(folder: Path, kind: str = "fp32") -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = tiny_configs(write_qwen_tokenizer(folder / "words" / "tokenizer"))
    modules = random_modules(configs)
    transformer, qwen = original_state(modules["transformer"]), comfy_state(modules["text_encoder"])
    vae_names = original_names("sd1", {"vae": modules["vae"]}, {**configs, "unet": flux_bases._ANY_UNET})
    vae = {key.removeprefix("first_stage_model."): value for key, value in vae_names.items()}
    options, base = {"tokenizer": str(folder / "words")}, folder / f"z_image.{'gguf' if kind == 'gguf' else 'safetensors'}"
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
        whole |= {f"text_encoders.qwen3_4b.transformer.{key}": value for key, value in qwen.items()}
        _save(base, whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(base)}, parts(modules)
    if kind.startswith("fp8"):
        transformer, qwen = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, qwen))
    write_gguf(base, transformer, arch="lumina2") if kind == "gguf" else _save(base, transformer)
    _save(folder / "qwen_3_4b.safetensors", qwen)
    _save(folder / "ae.safetensors", vae)
    files = {"text_encoder": "qwen_3_4b", "vae": "ae"}
    return options | {"base_model": str(base), **{o: str(folder / f"{f}.safetensors") for o, f in files.items()}}, parts(modules)


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
