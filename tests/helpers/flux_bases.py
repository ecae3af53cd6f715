"""Tiny FLUX.1 bases with random weights, in every layout people have: diffusers folder, ComfyUI's separate files in bf16,
fp8 (plain and scaled), GGUF and 4 bits, all in one. Names come from diffusers' converter, turned round by trying it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from lora_trainer.bases import architecture
from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.parts import build_t5
from lora_trainer.families.flux import names as flux_names

from . import originals
from .original_checkpoint import original_names, write_words

WIDTH, HEADS = 64, 2
WORDS = ["▁a", "▁photo", "▁of", "▁cat", "▁on", "▁red", ",", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]
FP8 = torch.float8_e4m3fn
KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "FluxPipeline"
NARROW = {"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2}
"""The released transformer at a twelfth of its width, with fewer blocks."""


def write_t5_tokenizer(folder: Path) -> int:
    """A real T5 tokenizer of few pieces; returns the size of its vocabulary."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -float(i)) for i, word in enumerate(WORDS))]
    T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder)
    return len(pieces)


def tiny_configs(words: int, pieces: int, *, guidance: bool = True) -> dict[str, dict[str, Any]]:
    configs = {name: architecture.shipped("flux", name) for name in ("transformer", "vae", "text_encoder", "text_encoder_2")}
    configs["transformer"] |= {
        "num_layers": 2, "num_single_layers": 2, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS,
        "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": guidance, "axes_dims_rope": [4, 14, 14],
    }  # fmt: skip
    configs["vae"] |= {
        "block_out_channels": [32] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 1,
    }  # fmt: skip
    configs["text_encoder"] |= {
        "vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1, "pad_token_id": words - 1,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1,
    }  # fmt: skip
    configs["text_encoder_2"] |= {"vocab_size": pieces, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return configs


def random_modules(configs: dict[str, dict[str, Any]], seed: int = 0) -> dict[str, nn.Module]:
    build: dict[str, Callable[[Any], nn.Module]] = {
        "transformer": FluxTransformer2DModel.from_config, "text_encoder_2": build_t5, "vae": AutoencoderKL.from_config,
        "text_encoder": BUILDERS["text_encoder"],
    }  # fmt: skip
    return randomised({name: build[name](config).eval() for name, config in configs.items()}, seed)


def randomised(modules: dict[str, nn.Module], seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    for module in modules.values():
        for key, parameter in module.named_parameters():
            nn.init.normal_(parameter, mean=float("norm" in key and "linear" not in key), std=0.1)
        module.float()
    return modules


def original_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The transformer (FLUX's or Chroma's) under Black Forest Labs' names; `converted` turns it back as diffusers does."""
    chroma = "approximator_layers" in cast(Any, transformer).config
    return originals.original_state(transformer, flux_names.CHROMA if chroma else flux_names.FLUX)


def converted(state: dict[str, Tensor], monkeypatch: Any) -> dict[str, Tensor]:
    """What diffusers' own converter makes of it; its width is hard-coded, and here ours."""
    source = Path(single_file_utils.__file__).read_text(encoding="utf-8").replace("inner_dim = 3072", f"inner_dim = {WIDTH}")
    scope: dict[str, Any] = {"__name__": single_file_utils.__name__, "__package__": "diffusers.loaders"}
    exec(compile(source, single_file_utils.__file__, "exec"), scope)
    return dict(scope["convert_flux_transformer_checkpoint_to_diffusers"](dict(state)))


def write_folder(path: Path, *, guidance: bool = True, transformer_only: bool = False) -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    configs = tiny_configs(write_words(path / "tokenizer"), write_t5_tokenizer(path / "tokenizer_2"), guidance=guidance)
    modules = random_modules(configs)
    for name, module in modules.items():
        if name == "text_encoder_2":
            whole = T5EncoderModel(module.config)
            whole.load_state_dict({**module.state_dict(), "shared.weight": module.encoder.embed_tokens.weight})
            module = whole
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(architecture.shipped("flux", "scheduler")))
    index = {
        "_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return modules


def to_fp8(state: dict[str, Tensor], *, scaled: bool) -> dict[str, Tensor]:
    """Matrices in fp8 as ComfyUI keeps them: cast, or divided by one factor that lies beside them."""
    small: dict[str, Tensor] = {}
    for key, value in state.items():
        if value.ndim != 2 or not key.endswith("weight"):
            small[key] = value.bfloat16()
        elif scaled:
            scale = value.abs().max() / 448
            small[key], small[f"{key.removesuffix('weight')}scale_weight"] = (value / scale).to(FP8), scale.float()
        else:
            small[key] = value.to(FP8)
    return small | ({"scaled_fp8": torch.zeros(2, dtype=FP8)} if scaled else {})


def write_gguf(path: Path, state: dict[str, Tensor], kind: str = "Q8_0", arch: str = "flux") -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, arch)
    for key, value in state.items():
        packs = value.ndim == 2 and key.endswith("weight") and value.shape[1] % 32 == 0
        type_ = GGMLQuantizationType[kind if packs else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(value.numpy()), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_files(folder: Path, kind: str = "fp32", *, guidance: bool = True) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it; returns the options of `modelo` that name its files, and the modules.

    `kind`: of the transformer and T5: fp32, fp8, fp8_scaled, gguf; all_in_one puts everything into one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words, pieces = write_words(folder / "words" / "tokenizer"), write_t5_tokenizer(folder / "words" / "tokenizer_2")
    configs = tiny_configs(words, pieces, guidance=guidance)
    modules = random_modules(configs)
    transformer, t5 = original_state(modules["transformer"]), dict(modules["text_encoder_2"].state_dict())
    t5["shared.weight"] = t5.pop("encoder.embed_tokens.weight")
    clip = {f"text_model.{key.removeprefix('text_model.')}": value for key, value in modules["text_encoder"].state_dict().items()}
    vae_names = original_names("sd1", {"vae": modules["vae"]}, {**configs, "unet": _ANY_UNET})
    vae = {key.removeprefix("first_stage_model."): value for key, value in vae_names.items()}
    options = {"tokenizer": str(folder / "words")}
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
        whole |= {f"text_encoders.clip_l.transformer.{key}": value for key, value in clip.items()}
        whole |= {f"text_encoders.t5xxl.transformer.{key}": value for key, value in t5.items()}
        _save(folder / "flux.safetensors", whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(folder / "flux.safetensors")}, modules
    if kind.startswith("fp8"):
        transformer, t5 = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, t5))
    base = folder / ("flux.gguf" if kind == "gguf" else "flux.safetensors")
    write_gguf(base, transformer) if kind == "gguf" else _save(base, transformer)
    for name, state in (("clip_l", clip), ("t5xxl", t5), ("ae", vae)):
        _save(folder / f"{name}.safetensors", state)
    files = {"text_encoder": "clip_l", "text_encoder_2": "t5xxl", "vae": "ae"}
    return options | {"base_model": str(base), **{o: str(folder / f"{f}.safetensors") for o, f in files.items()}}, modules


_ANY_UNET = {"layers_per_block": 1, "up_block_types": []}


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
