"""Tiny Stable Diffusion 3.5 bases with random weights, in every layout people have: diffusers folder, ComfyUI's separate files
in fp32, fp8 (plain and scaled) and GGUF, all in one. Four blocks: one with a second attention, two plain, and the last."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5EncoderModel

from lora_trainer.bases import architecture
from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.parts import build_t5
from lora_trainer.families.sd3 import names as sd3_names

from . import originals
from .flux_bases import randomised, to_fp8, write_gguf, write_t5_tokenizer
from .original_checkpoint import original_names, write_words

KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "StableDiffusion3Pipeline"
NARROW = {
    "num_layers": 4, "num_attention_heads": 2, "caption_projection_dim": 128, "dual_attention_layers": [0, 1],
    "pos_embed_max_size": 64,
}  # fmt: skip
"""The released transformer at a twelfth of its width, with fewer blocks."""
WIDTH, LAYERS = 64, 4
TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3")
DEEP = 13
"""Layers of CLIP-G: it is told from CLIP-L, which has 12, by their number."""


def tiny_configs(words: int, pieces: int, *, projected: bool = True, first: bool = False) -> dict[str, dict[str, Any]]:
    """`projected`: CLIP-L with its projection, as diffusers folders have it; `first`: SD3-medium rather than 3.5."""
    configs = {name: architecture.shipped("sd3", name) for name in ("transformer", "vae", *TEXT_PARTS)}
    configs["transformer"] |= {
        "num_layers": LAYERS, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 96,
        "caption_projection_dim": WIDTH, "pooled_projection_dim": 72, "pos_embed_max_size": 24, "dual_attention_layers": [0],
    }  # fmt: skip
    if first:
        configs["transformer"] |= {
            "attention_head_dim": 64, "num_attention_heads": 1, "dual_attention_layers": [], "qk_norm": None,
        }  # fmt: skip
    configs["vae"] |= {
        "block_out_channels": [32] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 1,
    }  # fmt: skip
    text = {"vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1, "num_attention_heads": 1}
    configs["text_encoder"] |= text | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "projection_dim": 32, "pad_token_id": words - 1,
        "architectures": ["CLIPTextModelWithProjection" if projected else "CLIPTextModel"],
    }  # fmt: skip
    configs["text_encoder_2"] |= text | {
        "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": DEEP, "projection_dim": 40
    }
    configs["text_encoder_3"] |= {"vocab_size": pieces, "d_model": 96, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return configs


def random_modules(configs: dict[str, dict[str, Any]], seed: int = 0) -> dict[str, nn.Module]:
    build: dict[str, Callable[[Any], nn.Module]] = {
        "transformer": SD3Transformer2DModel.from_config, "text_encoder_3": build_t5, "vae": AutoencoderKL.from_config, **{
            name: BUILDERS[name] for name in TEXT_PARTS[:2]
        },
    }  # fmt: skip
    return randomised({name: build[name](config).eval() for name, config in configs.items()}, seed)


def original_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The transformer under Stability's names; diffusers' converter turns it back."""
    return originals.original_state(transformer, sd3_names.SD3)


def write_folder(path: Path, *, t5: bool = True, first: bool = False) -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    words = write_words(path / "tokenizer")
    _write_second_tokenizer(path / "tokenizer_2")
    modules = random_modules(tiny_configs(words, write_t5_tokenizer(path / "tokenizer_3"), first=first))
    if not t5:
        del modules["text_encoder_3"]
    for name, module in modules.items():
        if name == "text_encoder_3":
            whole = T5EncoderModel(module.config)
            whole.load_state_dict({**module.state_dict(), "shared.weight": module.encoder.embed_tokens.weight})
            module = whole
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(architecture.shipped("sd3", "scheduler")))
    third = ["transformers", "T5EncoderModel"] if t5 else [None, None]
    index = {
        "_class_name": PIPELINE, "transformer": ["diffusers", "SD3Transformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"], "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "text_encoder_3": third, "tokenizer_3": ["transformers", "T5TokenizerFast"] if t5 else [None, None],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "image_encoder": [None, None], "feature_extractor": [None, None],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return modules


def _write_second_tokenizer(folder: Path) -> None:
    """The same words, padded with "!" as CLIP-G's are."""
    write_words(folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"pad_token": "!"}), encoding="utf-8")


def write_files(
    folder: Path, kind: str = "fp32", *, t5: bool = True, first: bool = False
) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it; returns the options of `modelo` that name its files, and the modules.

    `kind`: of the transformer and T5: fp32, fp8, fp8_scaled, gguf; all_in_one puts everything into one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words, pieces = write_words(folder / "words" / "tokenizer"), write_t5_tokenizer(folder / "words" / "tokenizer_3")
    _write_second_tokenizer(folder / "words" / "tokenizer_2")
    configs = tiny_configs(words, pieces, projected=False, first=first)
    modules = random_modules(configs)
    if not t5:
        del modules["text_encoder_3"]
    states = {"clip_l": _clip(modules["text_encoder"]), "clip_g": _clip(modules["text_encoder_2"])}
    if t5:
        states["t5xxl"] = dict(modules["text_encoder_3"].state_dict())
        states["t5xxl"]["shared.weight"] = states["t5xxl"].pop("encoder.embed_tokens.weight")
    names = original_names("sd1", {"vae": modules["vae"]}, {**configs, "unet": {"layers_per_block": 1, "up_block_types": []}})
    transformer, options = original_state(modules["transformer"]), {"tokenizer": str(folder / "words")}
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()} | names
        for name, state in states.items():
            whole |= {f"text_encoders.{name}.transformer.{key}": value for key, value in state.items()}
        _save(folder / "sd3.safetensors", whole)
        return options | {"base_model": str(folder / "sd3.safetensors")}, modules
    if kind.startswith("fp8"):
        transformer = to_fp8(transformer, scaled=kind == "fp8_scaled")
        states |= {"t5xxl": to_fp8(states["t5xxl"], scaled=kind == "fp8_scaled")} if t5 else {}
    base = folder / ("sd3.gguf" if kind == "gguf" else "sd3.safetensors")
    write_gguf(base, transformer, arch="sd3") if kind == "gguf" else _save(base, transformer)
    states["sd3_vae"] = {key.removeprefix("first_stage_model."): value for key, value in names.items()}
    for name, state in states.items():
        _save(folder / f"{name}.safetensors", state)
    files = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl", "vae": "sd3_vae"}
    given = {option: str(folder / f"{file}.safetensors") for option, file in files.items() if file in states}
    return options | {"base_model": str(base), **given}, modules


def _clip(module: nn.Module) -> dict[str, Tensor]:
    """Every key of the transformer under `text_model.`, the projection outside it."""
    state = {key.removeprefix("text_model."): value for key, value in module.state_dict().items()}
    return {key if key.startswith("text_projection") else f"text_model.{key}": value for key, value in state.items()}


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
