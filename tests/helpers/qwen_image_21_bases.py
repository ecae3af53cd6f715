"""Tiny Qwen-Image 2.1 bases with random weights: diffusers folder, ComfyUI's files (whose MLP's gate and value are one matrix
and whose VAE has Wan's names), GGUF as stable-diffusion.cpp writes it, all in one."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from lora_trainer.bases import architecture
from lora_trainer.families.qwen_image_21 import vae as qwen21_vae

from .flux_bases import randomised, to_fp8, write_gguf
from .llm_files import body_of, comfy_state, tiny_text_config, whole_model, write_qwen_tokenizer

KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "QwenImage21Pipeline"
NARROW = {"num_layers": 4, "num_attention_heads": 2}
"""The released transformer at a sixteenth of its width, with fewer blocks."""
RES_BLOCKS = 2
SYSTEM = "Comprehend and analyze the provided prompt."
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>\n{% endfor %}"


def write_tokenizer(folder: Path) -> int:
    return write_qwen_tokenizer(folder, [SYSTEM] * 4, VISION)


def pipeline_parts(folder: Path) -> dict[str, Any]:
    """A processor without its part for videos, which would want torchvision."""

    class Processor(transformers.Qwen3VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template)

        def get_attributes(self) -> list[str]:  # type: ignore[override]
            return ["image_processor", "tokenizer"]

    tokenizer = AutoTokenizer.from_pretrained(folder / "processor")
    return {"processor": Processor(transformers.Qwen2VLImageProcessorPil(), tokenizer, CHAT)}


def tiny_configs(vocabulary: int) -> dict[str, dict[str, Any]]:
    transformer = {
        "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 2, "context_in_dim": 32, "axes_dims_rope": [4, 14, 14],
    }  # fmt: skip
    return {
        "transformer": architecture.shipped("qwen_image_21", "transformer") | transformer,
        "text_encoder": tiny_text_config("qwen3_vl", vocabulary),
        "vae": architecture.shipped("qwen_image_21", "vae") | {"base_dim": 4, "decoder_base_dim": 6},
    }


def random_modules(configs: dict[str, dict[str, Any]]) -> dict[str, nn.Module]:
    """With the whole language model as `text_encoder`."""
    torch.manual_seed(0)
    made = {
        "transformer": QwenImage21Transformer2DModel.from_config(configs["transformer"]).eval(),
        "vae": AutoencoderKLQwenImage21.from_config(configs["vae"]).eval(),
    }
    made = randomised(made)
    nn.init.normal_(made["transformer"].txt_in.text_norm.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    return {**made, "text_encoder": whole_model("qwen3_vl", configs["text_encoder"])}


def fused_state(transformer: nn.Module) -> dict[str, Tensor]:
    """As ComfyUI keeps it: gate above value."""
    state = dict(transformer.state_dict())
    for name in [name for name in state if ".gate_layer." in name]:
        state[name.replace("gate_layer", "gate_up")] = torch.cat([state.pop(name), state.pop(name.replace("gate_layer", "proj"))])
    return state


def wan_state(vae: nn.Module) -> dict[str, Tensor]:
    """As qwen_image_2.1_vae_bf16.safetensors names it, with kernels one frame deep."""
    state = {}
    for name, value in vae.state_dict().items():
        flat = value.ndim == 4 and ("to_qkv" in name or "proj" in name or ".resample." in name)
        key = qwen21_vae.original(name, RES_BLOCKS)
        state[key] = value if value.ndim != 4 or flat or name.endswith("gamma") else value[:, :, None]
    return state


def parts(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """As the family names and cuts them."""
    return {**modules, "text_encoder": body_of(modules["text_encoder"])}


def write_folder(path: Path) -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    modules = random_modules(tiny_configs(write_tokenizer(path / "processor")))
    for name, module in modules.items():
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    scheduler = architecture.shipped("qwen_image_21", "scheduler")
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    index = {
        "_class_name": PIPELINE, "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"], "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "processor": ["transformers", "Qwen3VLProcessor"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return parts(modules)


def write_files(folder: Path, kind: str = "fp32") -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = random_modules(tiny_configs(write_tokenizer(folder / "words" / "processor")))
    transformer, qwen, vae = fused_state(modules["transformer"]), comfy_state(modules["text_encoder"]), wan_state(modules["vae"])
    options = {"tokenizer": str(folder / "words")}
    base = folder / f"qwen_image_2.1.{'gguf' if kind == 'gguf' else 'safetensors'}"
    whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
    if kind == "all_in_one":
        whole |= {f"text_encoders.qwen3vl_8b.transformer.{key}": value for key, value in qwen.items()}
        _save(base, whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(base)}, parts(modules)
    if kind.startswith("fp8"):
        transformer, qwen = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, qwen))
    write_gguf(base, whole, arch="qwen_image21") if kind == "gguf" else _save(base, transformer)
    _save(folder / "qwen3vl_8b.safetensors", qwen)
    _save(folder / "qwen_image_2.1_vae.safetensors", vae)
    files = {"text_encoder": "qwen3vl_8b", "vae": "qwen_image_2.1_vae"}
    return options | {"base_model": str(base), **{o: str(folder / f"{f}.safetensors") for o, f in files.items()}}, parts(modules)


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
