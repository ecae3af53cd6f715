"""Tiny language models as text encoders, in the layouts people have: transformers folders, ComfyUI's files, llama.cpp's GGUF."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerFast, Qwen2Tokenizer

from lora_trainer.diffusion.llm_text import MODELS, gguf_key

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEXTS = [
    "system\nuser\nassistant\n\n\n\n", "a photo of a cat on red, a red cat",
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the objects and "
    "background:",
]  # fmt: skip
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""What Qwen3's template comes to for one message of a user."""

MISTRAL_MARKS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"]
MISTRAL_IMAGES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ m.content[0].text }}[/INST]{% endif %}{% endfor %}"
)
"""What Mistral Small's template comes to for a system message and one of a user."""


def write_qwen_tokenizer(folder: Path, texts: Sequence[str] = (), special: Sequence[str] = ()) -> int:
    """A real Qwen tokenizer to which each word of TEXTS (and of `texts`) is one token; returns the size of its vocabulary."""
    trained = Qwen2Tokenizer().train_new_from_iterator(
        [*TEXTS, *texts], 600, new_special_tokens=[*SPECIAL, *special], show_progress=False
    )
    trained.chat_template = CHAT
    trained.save_pretrained(folder)
    return len(trained)


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


def tiny_text_config(model: str, vocabulary: int, *, width: int = 32, layers: int = 2) -> dict[str, Any]:
    """Flat; two heads of `width` / 2, which share one key. `model`: a key of MODELS."""
    config = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": width // 2, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "model_type": MODELS[model].types[-1] if model.endswith("_vl") else model,
    }  # fmt: skip
    third = width // 12
    sections = {"mrope_section": [width // 4 - 2 * third, third, third], "rope_type": "default", "rope_theta": 10000.0}
    extra = {
        "qwen2_5_vl": {"rope_scaling": sections}, "qwen3_vl": {"rope_scaling": {**sections, "mrope_interleaved": True}},
        "mistral": {"sliding_window": None},
    }  # fmt: skip
    return config | extra.get(model, {})


def whole_model(model: str, text: dict[str, Any], seed: int = 0) -> nn.Module:
    """As its pipeline holds it: with a head, and the vision models with their tower."""
    text = {name: value for name, value in text.items() if name != "model_type"}
    torch.manual_seed(seed)
    made: Any
    if model == "qwen2_5_vl":
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": text["hidden_size"]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        made = transformers.Qwen2_5_VLForConditionalGeneration(config)
    elif model == "qwen3_vl":
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": text["hidden_size"],
                  "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
        made = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig(text_config=text, vision_config=vision))
    else:
        kind = MODELS[model].kind
        made = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**text))
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name and not name.endswith("bias")), std=0.1)
    return made.eval().float()


def body_of(whole: nn.Module) -> nn.Module:
    """What an encoder is made of."""
    inner: Any = whole.model
    return getattr(inner, "language_model", inner)


def with_vision(whole: nn.Module) -> nn.Module:
    """A Mistral with the vision tower that it has in folders."""
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "head_dim": 16, "patch_size": 16, "image_size": 32,
    }  # fmt: skip
    text: Any = whole.config
    config = Mistral3Config(text_config=text.to_dict(), vision_config=vision, image_token_index=8)
    made: Any = Mistral3ForConditionalGeneration(config)
    made.model.language_model.load_state_dict(body_of(whole).state_dict())
    return made.eval().float()


def comfy_state(whole: nn.Module) -> dict[str, Tensor]:
    """ComfyUI's names: `model.layers…`, `visual…`, and a head nobody needs."""
    state = {f"model.{name}": value for name, value in body_of(whole).state_dict().items()}
    vision = getattr(whole.model, "visual", None)
    state |= {f"visual.{name}": value for name, value in vision.state_dict().items()} if vision is not None else {}
    return state | {"lm_head.weight": whole.lm_head.weight}


def to_comfy_fp8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As ComfyUI writes it now: one factor a matrix, one for its input, and how it is quantised as JSON."""
    small: dict[str, Tensor] = {}
    for key, value in state.items():
        if value.ndim != 2 or "_proj.weight" not in key:
            small[key] = value.bfloat16()
            continue
        stem, scale = key.removesuffix("weight"), value.abs().max() / 448
        small |= {key: (value / scale).to(torch.float8_e4m3fn), f"{stem}weight_scale": scale.float()}
        note = torch.tensor([*b'{"format": "float8_e4m3fn"}'], dtype=torch.uint8)
        small |= {f"{stem}input_scale": torch.ones(()), f"{stem}comfy_quant": note}
    return small


def write_llm_gguf(path: Path, model: str, whole: nn.Module, kind: str = "Q8_0") -> None:
    """As llama.cpp's converter writes it: rows that rotate together side by side, where it keeps them so."""
    body: Any = body_of(whole)
    heads = {"q": body.config.num_attention_heads, "k": body.config.num_key_value_heads}
    writer = GGUFWriter(path, {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "mistral": "llama"}.get(model, model))
    for name, value in {**body.state_dict(), "output.weight": whole.lm_head.weight}.items():
        key = name if name == "output.weight" else gguf_key(name)
        if MODELS[model].pairs and (".attn_q." in key or ".attn_k." in key):
            value = value.unflatten(0, (heads[key.split("attn_")[1][0]], 2, -1)).transpose(1, 2).reshape(value.shape)
        type_ = GGMLQuantizationType[kind if value.ndim == 2 and value.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(key, quantize(value.detach().contiguous().numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
