"""Tiny GGUF files, written as llama.cpp's converter writes them, from random transformers models."""

import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0], "long_factor": [2.0] * 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-3.1": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "phi3": ("phi3", {"original_max_position_embeddings": 128}),
    "phi3-long": (
        "phi3",
        {"rope_scaling": LONG, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 512,
         "max_position_embeddings": 1024},
    ),
    "gemma": ("gemma", {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 8, "query_pre_attn_scalar": 32, "head_dim": 32, "rope_theta": 10000.0,
         "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "query_pre_attn_scalar": 32, "head_dim": 32, "num_hidden_layers": 7,
         "rope_local_base_freq": 10000.0, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def tiny_model(name: str, **changes: Any) -> nn.Module:
    """A float32 model whose weights depend on their names alone; norms and biases too are random, so that a missing shift
    or order shows, and matrices are large enough for attention to look somewhere."""
    model_type, extra = MODELS[name]
    config = AutoConfig.for_model(model_type, **{"tie_word_embeddings": False, **SMALL, **extra, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        noise = random_values(key, parameter.shape)
        if parameter.ndim > 1:
            parameter.zero_()
        parameter.add_(noise, alpha=0.3 if parameter.ndim == 1 else 0.1)
    return model


def random_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def write_model(path: Path, model: nn.Module, name: str, kind: str = "F32", *, token_embd: str | None = None) -> Path:
    """`kind` for all matrices of the blocks and the head; the embedding's may differ."""
    config, arch = model.config, architecture_of(name)
    writer = GGUFWriter(path, arch)
    _write_config(writer, config, arch, name)
    number = next(number for number, known in MODEL_ARCH_NAMES.items() if known == arch)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    for key, value in _stacked(model.state_dict()).items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert tensor, key
        values = as_llama_cpp(value, tensor, config, arch).numpy()
        this = token_embd or kind if tensor == "token_embd.weight" else kind
        this = "F32" if values.ndim == 1 or "ffn_gate_inp" in tensor else this
        _add(writer, tensor, values, this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts' fused gates and ups (E, 2 I, D) apart, under names that llama.cpp's table knows; sides of one gone."""
    found = {}
    for key, value in state.items():
        stem, _, leaf = key.rpartition(".")
        if leaf == "gate_up_proj":
            found[f"{stem}.gate_proj.weight"], found[f"{stem}.up_proj.weight"] = value.chunk(2, 1)
        elif leaf == "down_proj":
            found[f"{key}.weight"] = value
        else:
            found[key] = value.flatten() if value.shape[0] == 1 else value
    return found


def architecture_of(name: str) -> str:
    return name.partition("-")[0]


def as_llama_cpp(value: torch.Tensor, tensor: str, config: Any, arch: str) -> torch.Tensor:
    """What the converter makes of a parameter: `permute` for llama's rope, 1 + w for Gemma's norms."""
    if arch in ("llama", "granite", "smollm3") and ("attn_q." in tensor or "attn_k." in tensor):
        heads = config.num_attention_heads if "attn_q." in tensor else config.num_key_value_heads
        return value.reshape(heads, 2, len(value) // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if arch.startswith("gemma") and tensor.endswith("norm.weight"):
        return value + 1
    return value


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of random bytes whose factors make weights of about 0.05, for kinds that `gguf` cannot quantise to."""
    from lora_trainer.files.gguf_blocks import LAYOUTS

    layout, random = LAYOUTS[kind], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (prod(shape) // layout.weights, layout.nbytes), dtype=np.uint8)
    factors = {"Q4_K": (0, 2e-4, 2, 1.5e-3), "Q5_K": (0, 1e-4, 2, 1.5e-3), "Q6_K": (208, 4e-5), "Q8_0": (0, 7e-4),
               "Q2_K": (80, 4e-3, 82, 6e-3), "Q3_K": (108, 1e-3), "Q4_0": (0, 1e-2), "Q4_1": (0, 1e-2, 2, -7.5e-2),
               "Q5_0": (0, 5e-3), "Q5_1": (0, 5e-3, 2, -7.5e-2)}[kind]  # fmt: skip
    for at, size in zip(factors[::2], factors[1::2], strict=True):
        values = (random.uniform(0.5, 1.5, len(blocks)) * size).astype(np.float16)
        blocks[:, int(at) : int(at) + 2] = values[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add(writer: GGUFWriter, tensor: str, values: np.ndarray, kind: str) -> None:
    number = GGMLQuantizationType[kind]
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        data = random_blocks(kind, values.shape, seed=sum(tensor.encode()))
    else:
        data = quantize(values, number)
    writer.add_tensor(tensor, data, raw_dtype=number)


def _write_config(writer: GGUFWriter, config: Any, arch: str, name: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    if arch != "gemma2":
        writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    if arch != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if full["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config).numpy())
    if full["rope_type"] == "yarn":
        writer.add_string(f"{arch}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(full["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(full["short_factor"], np.float32))
    if arch == "phi3":
        original = full.get("original_max_position_embeddings", config.max_position_embeddings)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(original)) ** 0.5 if scale > 1 else 1.0)
        writer.add_sliding_window(getattr(config, "sliding_window", None) or 0)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch.endswith("moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def llama3_factors(config: Any) -> torch.Tensor:
    """As convert_hf_to_gguf writes them: a factor for each pair, from wavelengths (arXiv 2407.21783)."""
    rope, dim = config.rope_parameters, config.head_dim
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    length = rope["original_max_position_embeddings"]
    longest, shortest = length / rope["low_freq_factor"], length / rope["high_freq_factor"]
    smooth = (length / waves - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return torch.where(waves < shortest, 1.0, torch.where(waves > longest, rope["factor"], between)).float()


def probe_ids() -> torch.Tensor:
    """(1, 40)"""
    return torch.arange(40)[None] * 37 % (VOCABULARY - 3) + 3


def tiny_lora(model: nn.Module) -> dict[str, Any]:
    """A LoRA on every linear layer that llama.cpp takes one for: two ranks, two scales."""
    from lora_trainer.layouts import LoraModule

    lora = {}
    for name, layer in model.named_modules():
        tied = name == "lm_head" and model.config.tie_word_embeddings
        if isinstance(layer, nn.Linear) and not tied and not name.endswith("shared_expert_gate"):
            rank, scale = (4 if "attn" in name else 2), (2.0 if "q_proj" in name else 0.5)
            down = random_values(f"{name}.A", (rank, layer.in_features)) * 0.2
            up = random_values(f"{name}.B", (layer.out_features, rank)) * 0.2
            lora[f"language_model.{name}"] = LoraModule(down, up, scale)
    return lora


def merge(model: nn.Module, lora: dict[str, Any]) -> nn.Module:
    for name, module in lora.items():
        model.get_submodule(name.removeprefix("language_model.")).weight.add_(module.delta())
    return model
