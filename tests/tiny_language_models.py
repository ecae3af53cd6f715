"""Tiny causal LMs of the real classes, saved by transformers itself, and batches of random tokens for them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lora_trainer.config.schema import ModelConfig
from lora_trainer.families.causal_lm.family import CausalLM
from lora_trainer.files.sources import open_source

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "cohere": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", {}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **MOE}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
PADDED = 0


def save_tiny(
    folder: Path, kind: str = "llama", *, shard_bytes: int | None = None, gain: float = 2.0, **changes: Any
) -> Any:
    """A random model whose every part matters (the more, the higher its `gain`), saved in `folder`; transformers' own."""
    name, special = KINDS[kind]
    config = AutoConfig.for_model(name, **{**COMMON, **special, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.5 if "norm" in key else gain / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in key))
    model.save_pretrained(folder, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    return model.eval()


def open_tiny(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM.open(open_source(str(folder)), ModelConfig(base_model=str(folder), **settings))


def batch_of(*rows: list[list[int]], ignored: int = 1) -> dict[str, Tensor]:
    """Each row a list of texts (token lists) end to end, padded to the longest; the first `ignored` labels are -100."""
    length = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), length)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    batch |= {"labels": torch.full(shape, -100), "segment_ids": torch.full(shape, PADDED)}
    for index, row in enumerate(rows):
        at = 0
        for number, text in enumerate(row, 1):
            here, ids = slice(at, at + len(text)), torch.tensor(text)
            batch["input_ids"][index, here], batch["segment_ids"][index, here] = ids, number
            batch["position_ids"][index, here] = torch.arange(len(text))
            batch["labels"][index, at + ignored : at + len(text)] = ids[ignored:]
            at += len(text)
    count = len(rows)
    return {**batch, "seeds": torch.zeros(count, dtype=torch.int64), "weight": torch.ones(count)}


def texts(*lengths: int, vocabulary: int = 96, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
