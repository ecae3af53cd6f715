"""Tiny bases with random weights, in the layouts people's files have: an original single file or a diffusers folder.

Widths are such that heads and norm groups follow the families' rules, so that a single file tells all there is to know.
The single file's names come from the loader's own maps; tests hold those against diffusers' loader.
"""

import json
from pathlib import Path
from typing import Any

import torch
from make_demo.tokenizer import write_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.bases import architecture, single_file
from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.weights import WHOLE
from lora_trainer.files.kinds import Part

CAPTION = "a photo of a cat on red"
WORDS = [CAPTION]
CROSS_DOWN, CROSS_UP = "CrossAttnDownBlock2D", "CrossAttnUpBlock2D"


def write_words(folder: Path) -> int:
    """A tokenizer that knows the words of CAPTION; returns the size of its vocabulary."""
    write_tokenizer(WORDS, folder)
    return len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))


def tiny_configs(release: str, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Component -> config, the released architecture but small."""
    names = ["unet", "vae", "text_encoder"] + (["text_encoder_2"] if release == "sdxl" else [])
    configs = {name: architecture.shipped(release, name) for name in names}
    text = {"vocab_size": vocabulary, "bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}
    configs["vae"] |= {
        "block_out_channels": [32] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 1,
    }  # fmt: skip
    configs["text_encoder"] |= text | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1,
        "pad_token_id": 0 if release == "sd2" else vocabulary - 1,
    }  # fmt: skip
    if release == "sdxl":
        configs["text_encoder_2"] |= text | {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 1,
            "projection_dim": 40,
        }  # fmt: skip
        configs["unet"] |= {
            "block_out_channels": [32, 64], "down_block_types": ["DownBlock2D", CROSS_DOWN],
            "up_block_types": [CROSS_UP, "UpBlock2D"], "attention_head_dim": [1, 1], "layers_per_block": 1,
            "transformer_layers_per_block": [1, 2], "cross_attention_dim": 96, "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 40 + 6 * 8,
        }  # fmt: skip
    else:
        configs["unet"] |= {
            "block_out_channels": [32, 64], "down_block_types": [CROSS_DOWN, "DownBlock2D"],
            "up_block_types": ["UpBlock2D", CROSS_UP], "layers_per_block": 1, "cross_attention_dim": 32,
            "attention_head_dim": 8 if release == "sd1" else [1, 1],
        }  # fmt: skip
    return configs


def random_modules(configs: dict[str, dict[str, Any]], seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    modules = {name: BUILDERS[name](config).eval() for name, config in configs.items()}
    for module in modules.values():
        for parameter in module.parameters():  # no zeros and ones that a wrong place would hide
            nn.init.normal_(parameter, std=0.1)
    return modules


def original_names(
    release: str, modules: dict[str, nn.Module], configs: dict[str, dict[str, Any]]
) -> dict[str, Tensor]:
    """The state of a single file in the ldm or sgm layout."""
    empty: dict[str, Any] = {}
    open_clip = {"sd2": ("text_encoder", "cond_stage_model."), "sdxl": ("text_encoder_2", "conditioner.embedders.1.")}
    locate = {
        "unet": single_file.locate_unet(Part(empty, "model.diffusion_model."), configs["unet"]),
        "vae": single_file.locate_vae(Part(empty, "first_stage_model."), configs["vae"]),
        "text_encoder": single_file.locate_clip(
            Part(empty, "conditioner.embedders.0." if release == "sdxl" else "cond_stage_model.")
        ),
    }
    if release in open_clip:
        name, prefix = open_clip[release]
        locate[name] = single_file.locate_open_clip(Part(empty, prefix))
    state: dict[str, Tensor] = {}
    fused: dict[str, dict[int, Tensor]] = {}
    for part, module in modules.items():
        for name, value in module.state_dict().items():
            piece = locate[part](name)[0]
            if piece.share != WHOLE:
                fused.setdefault(piece.key, {})[int(3 * piece.share[0])] = value
                continue
            value = value.T if piece.transposed else value
            is_attention = part == "vae" and ".mid.attn_1." in piece.key and value.ndim == 2
            state[piece.key] = value[:, :, None, None] if is_attention else value
    return state | {key: torch.cat([thirds[i] for i in range(3)]) for key, thirds in fused.items()}


def write_single_file(
    path: Path, release: str, *, dtype: torch.dtype = torch.float32, extra: dict[str, Tensor] | None = None,
    metadata: dict[str, str] | None = None, rename: Any = None, change: Any = None,
) -> dict[str, nn.Module]:  # fmt: skip
    """Write the base and, beside it, its tokenizer in `words/`; returns the modules it was made from.

    `change` edits the configs first, `rename` maps each key (None drops it), `extra` adds tensors.
    """
    configs = tiny_configs(release, write_words(path.parent / "words"))
    if change:
        change(configs)
    modules = random_modules(configs)
    state = {key: value.to(dtype) for key, value in original_names(release, modules, configs).items()}
    if rename:
        state = {rename(key): value for key, value in state.items() if rename(key) is not None}
    state |= extra or {}
    save_file({key: value.contiguous().clone() for key, value in state.items()}, path, metadata)
    return modules


def write_folder(
    path: Path, release: str, *, variant: str | None = None, dtype: torch.dtype = torch.float32, **scheduler: Any
) -> dict[str, nn.Module]:
    """Write the base as a diffusers folder (weights included); returns the modules it was made from."""
    configs = tiny_configs(release, write_words(path / "tokenizer"))
    modules = random_modules(configs)
    classes = {
        name: ["diffusers" if name in ("unet", "vae") else "transformers", type(m).__name__]
        for name, m in modules.items()
    }
    tokenizers = {"tokenizer": ["transformers", "CLIPTokenizer"]}
    if release == "sdxl":
        write_words(path / "tokenizer_2")
        tokenizers["tokenizer_2"] = tokenizers["tokenizer"]
    for name, module in modules.items():
        module.to(dtype).save_pretrained(path / name, variant=variant)
    (path / "scheduler").mkdir()
    config = architecture.shipped(release, "scheduler") | {"prediction_type": "epsilon"} | scheduler
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    pipeline = "StableDiffusionXLPipeline" if release == "sdxl" else "StableDiffusionPipeline"
    index = {"_class_name": pipeline, "scheduler": ["diffusers", "DDIMScheduler"], **classes, **tokenizers}
    if release != "sdxl":
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
    (path / "model_index.json").write_text(json.dumps(index))
    return modules
