"""Tiny Qwen-Image bases with random weights, in every layout people have: diffusers folder, ComfyUI's files, all in one."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.bases import architecture
from lora_trainer.families.qwen_image import vae as qwen_vae

from .flux_bases import randomised, to_fp8, write_gguf
from .llm_files import body_of, comfy_state, tiny_text_config, whole_model, write_qwen_tokenizer

KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "QwenImagePipeline"
NARROW = {"num_layers": 4, "num_attention_heads": 3}
"""The released transformer at an eighth of its width, with fewer blocks."""
RES_BLOCKS = 2
"""diffusers' converter knows no other number."""


def tiny_configs(vocabulary: int) -> dict[str, dict[str, Any]]:
    transformer = {
        "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32,
        "axes_dims_rope": [4, 14, 14],
    }  # fmt: skip
    vae = {"base_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": RES_BLOCKS}
    return {
        "transformer": architecture.shipped("qwen_image", "transformer") | transformer,
        "text_encoder": tiny_text_config("qwen2_5_vl", vocabulary),
        "vae": architecture.shipped("qwen_image", "vae") | vae,
    }


def random_modules(configs: dict[str, dict[str, Any]]) -> dict[str, nn.Module]:
    """With the whole language model as `text_encoder`."""
    torch.manual_seed(0)
    made = {
        "transformer": QwenImageTransformer2DModel.from_config(configs["transformer"]).eval(),
        "vae": AutoencoderKLQwenImage.from_config(configs["vae"]).eval(),
    }
    return {**randomised(made), "text_encoder": whole_model("qwen2_5_vl", configs["text_encoder"])}


def wan_state(vae: nn.Module) -> dict[str, Tensor]:
    """The VAE as qwen_image_vae.safetensors names it."""
    return {qwen_vae.original(name, RES_BLOCKS): value for name, value in vae.state_dict().items()}


def parts(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """As the family names and cuts them."""
    return {**modules, "text_encoder": body_of(modules["text_encoder"])}


def write_folder(path: Path) -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    modules = random_modules(tiny_configs(write_qwen_tokenizer(path / "tokenizer")))
    for name, module in modules.items():
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    scheduler = architecture.shipped("qwen_image", "scheduler")
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": PIPELINE, "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return parts(modules)


def write_files(folder: Path, kind: str = "fp32") -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = random_modules(tiny_configs(write_qwen_tokenizer(folder / "words" / "tokenizer")))
    transformer, qwen = dict(modules["transformer"].state_dict()), comfy_state(modules["text_encoder"])
    vae = wan_state(modules["vae"])
    options, base = {"tokenizer": str(folder / "words")}, folder / f"qwen_image.{'gguf' if kind == 'gguf' else 'safetensors'}"
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
        whole |= {f"text_encoders.qwen25_7b.transformer.{key}": value for key, value in qwen.items()}
        _save(base, whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(base)}, parts(modules)
    if kind.startswith("fp8"):
        transformer, qwen = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, qwen))
    write_gguf(base, transformer, arch="qwen_image") if kind == "gguf" else _save(base, transformer)
    _save(folder / "qwen_2.5_vl_7b.safetensors", qwen)
    _save(folder / "qwen_image_vae.safetensors", vae)
    files = {"text_encoder": "qwen_2.5_vl_7b", "vae": "qwen_image_vae"}
    return options | {"base_model": str(base), **{o: str(folder / f"{f}.safetensors") for o, f in files.items()}}, parts(modules)


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
