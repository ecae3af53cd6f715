"""Tiny FLUX.2 bases with random weights, in every layout people have: diffusers folder, ComfyUI's separate files, all in one.

klein, base or distilled, with a Qwen3 of 28 layers, and dev with a Mistral of 31 that has a vision tower in folders.
"""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast

from lora_trainer.bases import architecture
from lora_trainer.families.flux2 import names as flux2_names
from lora_trainer.families.flux2.vae import _locate_original
from lora_trainer.files.kinds import Part

from . import originals
from .flux_bases import randomised, to_fp8, write_gguf
from .llm_files import TEXTS, body_of, comfy_state, tiny_text_config, whole_model, write_qwen_tokenizer

WIDTH, HEADS, TEXT = 64, 2, 32
LAYERS = {"qwen3": 28, "mistral": 31}
KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
PIPELINE = "Flux2KleinPipeline"
NARROW = {"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2}
"""The released transformer at a twelfth of its width, with fewer blocks."""
MISTRAL_MARKS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"]
MISTRAL_IMAGES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ m.content[0].text }}[/INST]{% endif %}{% endfor %}"
)
"""What Mistral Small's template comes to for a system message and one of a user."""


def write_mistral_tokenizer(folder: Path) -> int:
    """A real byte-level tokenizer with Mistral's marks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = MISTRAL_MARKS + MISTRAL_IMAGES
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left",
        chat_template=MISTRAL_CHAT,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def tiny_configs(model: str, vocabulary: int) -> dict[str, dict[str, Any]]:
    """`model`: qwen3 (klein) or mistral (dev)."""
    release = {"qwen3": "flux2", "mistral": "flux2_dev"}[model]
    configs = {name: architecture.shipped(release, name) for name in ("transformer", "vae")}
    configs["transformer"] |= {
        "num_layers": 2, "num_single_layers": 2, "attention_head_dim": WIDTH // HEADS, "num_attention_heads": HEADS,
        "joint_attention_dim": 3 * TEXT, "axes_dims_rope": [WIDTH // HEADS // 4] * 4,
    }  # fmt: skip
    configs["vae"] |= {"block_out_channels": [32] * 4, "layers_per_block": 1}
    return {**configs, "text_encoder": tiny_text_config(model, vocabulary, width=TEXT, layers=LAYERS[model])}


def random_modules(configs: dict[str, dict[str, Any]], model: str) -> dict[str, nn.Module]:
    """With the whole language model as `text_encoder`."""
    torch.manual_seed(0)
    vae: Any = AutoencoderKLFlux2.from_config({k: v for k, v in configs["vae"].items() if k != "force_upcast"})
    made = randomised({"transformer": Flux2Transformer2DModel.from_config(configs["transformer"]).eval(), "vae": vae.eval()})
    nn.init.normal_(vae.bn.running_mean, std=0.1)
    nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    return {**made, "text_encoder": whole_model(model, configs["text_encoder"])}


def original_state(transformer: nn.Module) -> dict[str, Tensor]:
    """The transformer under Black Forest Labs' names."""
    return originals.original_state(transformer, flux2_names.FLUX2)


def original_vae(vae: nn.Module) -> dict[str, Tensor]:
    """As flux2-vae.safetensors has it."""
    state = {}
    for name, value in vae.state_dict().items():
        if name != "bn.num_batches_tracked":
            key = _locate_original(Part({}, ""), 4)(name)[0].key
            state[key] = value[:, :, None, None] if ".attn_1." in key and value.ndim == 2 else value
    return state


def parts(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """As the family names and cuts them."""
    return {**modules, "text_encoder": body_of(modules["text_encoder"])}


def write_folder(path: Path, variant: str = "base") -> dict[str, nn.Module]:
    """The base as a diffusers folder; `variant`: base, distilled (both klein), dev."""
    model = "mistral" if variant == "dev" else "qwen3"
    write = write_mistral_tokenizer if variant == "dev" else write_qwen_tokenizer
    configs = tiny_configs(model, write(path / "tokenizer"))
    modules = random_modules(configs, model)
    if variant == "dev":
        modules["text_encoder"] = _with_vision(configs["text_encoder"], modules["text_encoder"])
    for name, module in modules.items():
        module.save_pretrained(path / name)
    (path / "scheduler").mkdir()
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(architecture.shipped("flux2", "scheduler")))
    index = {
        "_class_name": "Flux2Pipeline" if variant == "dev" else PIPELINE,
        "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"],
        "text_encoder": ["transformers", type(modules["text_encoder"]).__name__],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast" if variant == "dev" else "Qwen2Tokenizer"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }  # fmt: skip
    index |= {"is_distilled": True} if variant == "distilled" else {}
    (path / "model_index.json").write_text(json.dumps(index))
    return parts(modules)


def _with_vision(text: dict[str, Any], whole: nn.Module) -> nn.Module:
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 16, "patch_size": 16, "image_size": 32,
    }  # fmt: skip
    made: Any = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, image_token_index=8))
    made.model.language_model.load_state_dict(body_of(whole).state_dict())
    return made.eval().float()


def write_files(folder: Path, kind: str = "fp32", *, dev: bool = False) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The base as ComfyUI's users keep it: the transformer, and the language model, of `kind`."""
    folder.mkdir(parents=True, exist_ok=True)
    model, write = ("mistral", write_mistral_tokenizer) if dev else ("qwen3", write_qwen_tokenizer)
    modules = random_modules(tiny_configs(model, write(folder / "words" / "tokenizer")), model)
    transformer, text, vae = (
        original_state(modules["transformer"]), comfy_state(modules["text_encoder"]), original_vae(modules["vae"])
    )  # fmt: skip
    options, base = {"tokenizer": str(folder / "words")}, folder / f"flux2.{'gguf' if kind == 'gguf' else 'safetensors'}"
    if kind == "all_in_one":
        whole = {f"model.diffusion_model.{key}": value for key, value in transformer.items()}
        whole |= {f"text_encoders.qwen3_4b.transformer.{key}": value for key, value in text.items()}
        _save(base, whole | {f"vae.{key}": value for key, value in vae.items()})
        return options | {"base_model": str(base)}, parts(modules)
    if kind.startswith("fp8"):
        transformer, text = (to_fp8(state, scaled=kind == "fp8_scaled") for state in (transformer, text))
    write_gguf(base, transformer) if kind == "gguf" else _save(base, transformer)
    files = {"text_encoder": ("text", text), "vae": ("flux2-vae", vae)}
    for name, state in files.values():
        _save(folder / f"{name}.safetensors", state)
    slots = {option: str(folder / f"{name}.safetensors") for option, (name, _) in files.items()}
    return options | {"base_model": str(base), **slots}, parts(modules)


def _save(path: Path, state: dict[str, Tensor]) -> None:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
