"""Tiny Chroma bases with random weights, in every layout people have; names by diffusers' converter, as FLUX's."""

import json
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL
from diffusers.loaders import single_file_utils
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5EncoderModel

from lora_trainer.bases import architecture
from lora_trainer.bases.parts import build_t5
from lora_trainer.families.chroma.network import build

from . import flux_bases
from .flux_bases import original_state, randomised, to_fp8, write_gguf, write_t5_tokenizer
from .original_checkpoint import original_names

WIDTH, HEADS = flux_bases.WIDTH, flux_bases.HEADS
KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "ChromaPipeline"
NARROW = {"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2, "approximator_hidden_dim": 320}
"""The released transformer at a twelfth of its width, with fewer blocks."""


def tiny_configs(pieces: int) -> dict[str, dict[str, Any]]:
    flux = flux_bases.tiny_configs(60, pieces)
    transformer = {
        "num_layers": 2, "num_single_layers": 2, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS,
        "joint_attention_dim": 32, "axes_dims_rope": [4, 14, 14], "approximator_num_channels": 32,
        "approximator_hidden_dim": 64, "approximator_layers": 2,
    }  # fmt: skip
    return {
        "transformer": architecture.shipped("chroma", "transformer") | transformer,
        "text_encoder": flux["text_encoder_2"],
        "vae": flux["vae"],
    }


def random_modules(configs: dict[str, dict[str, Any]]) -> dict[str, nn.Module]:
    made = {
        "transformer": build(configs["transformer"]), "text_encoder": build_t5(configs["text_encoder"]),
        "vae": AutoencoderKL.from_config(configs["vae"]),
    }  # fmt: skip
    return randomised({name: module.eval() for name, module in made.items()})


def converted(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What diffusers' own converter makes of it; its width is hard-coded, and here ours."""
    source = Path(single_file_utils.__file__).read_text(encoding="utf-8").replace("inner_dim = 3072", f"inner_dim = {WIDTH}")
    scope: dict[str, Any] = {"__name__": single_file_utils.__name__, "__package__": "diffusers.loaders"}
    exec(compile(source, single_file_utils.__file__, "exec"), scope)
    return dict(scope["convert_chroma_transformer_checkpoint_to_diffusers"](dict(state)))


def write_folder(path: Path) -> dict[str, nn.Module]:
    """The base as a diffusers folder; returns the modules it was made from."""
    modules = random_modules(tiny_configs(write_t5_tokenizer(path / "tokenizer")))
    t5 = modules["text_encoder"]
    whole = T5EncoderModel(t5.config)
    whole.load_state_dict({**t5.state_dict(), "shared.weight": t5.encoder.embed_tokens.weight})
    for name, module in {**modules, "text_encoder": whole}.items():
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(architecture.shipped("chroma", "scheduler")))
    index = {
        "_class_name": "ChromaPipeline", "transformer": ["diffusers", "ChromaTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"], "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    (path / "model_index.json").write_text(json.dumps(index))
    return modules


def write_files(folder: Path, kind: str = "fp32") -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it. In scaled fp8 the network of the modulations stays in 16 bits, as people's does."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = tiny_configs(write_t5_tokenizer(folder / "words" / "tokenizer"))
    modules = random_modules(configs)
    transformer, t5 = original_state(modules["transformer"]), dict(modules["text_encoder"].state_dict())
    t5["shared.weight"] = t5.pop("encoder.embed_tokens.weight")
    vae_names = original_names("sd1", {"vae": modules["vae"]}, {**configs, "unet": flux_bases._ANY_UNET})
    vae = {key.removeprefix("first_stage_model."): value for key, value in vae_names.items()}
    options, base = {"tokenizer": str(folder / "words")}, folder / f"chroma.{'gguf' if kind == 'gguf' else 'safetensors'}"
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
        whole |= {f"text_encoders.t5xxl.transformer.{key}": value for key, value in t5.items()}
        _save(base, whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(base)}, modules
    if kind.startswith("fp8"):
        kept = {key: value for key, value in transformer.items() if key.startswith("distilled_guidance_layer.")}
        transformer, t5 = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, t5))
        if kind == "fp8_scaled":
            transformer = {k: v for k, v in transformer.items() if not k.startswith("distilled_guidance_layer.")}
            transformer |= {key: value.bfloat16() for key, value in kept.items()}
    write_gguf(base, transformer, arch="chroma") if kind == "gguf" else _save(base, transformer)
    _save(folder / "t5xxl.safetensors", t5)
    _save(folder / "ae.safetensors", vae)
    files = {"text_encoder": "t5xxl", "vae": "ae"}
    return options | {"base_model": str(base), **{o: str(folder / f"{f}.safetensors") for o, f in files.items()}}, modules


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
