"""A transformers config from a GGUF file's metadata.

Everything that the file says of the model's shape is set, also where it equals the config class's default. How positions
are stretched (`rope_scaling`) is set from the tensors that hold it, which transformers' own reader leaves out.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import SourceError
from .gguf_blocks import dequantize
from .gguf_names import architecture
from .gguf_reader import GgufFile

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1, 3.2 and 3.3: their files hold the resulting factors alone, by which they are recognised."""


def transformers_config(file: GgufFile, what: str = "modelo_base") -> Any:
    """The config object. SourceError where the architecture is not known, or a key is missing."""
    from transformers import AutoConfig

    known = architecture(file, what)
    keys = _Keys(file, what)
    values = _common(keys) | _ropes(keys) | EXTRA.get(file.architecture, _nothing)(keys)
    return AutoConfig.for_model(known.model_type, **values)


class _Keys:
    """The metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, what: str) -> None:
        self.file, self.what = file, what

    def __call__(self, name: str) -> Any:
        value = self.get(name)
        if value is None or isinstance(value, list):
            self.refuse(f"{self.file.architecture}.{name}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{name}", default)

    def token(self, name: str) -> int | None:
        return self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")

    def values(self, tensor: str) -> torch.Tensor | None:
        if tensor not in self.file.tensors:
            return None
        return dequantize(self.file.raw(tensor), self.file.tensors[tensor].dtype, torch.float32).flatten()

    def refuse(self, subject: str) -> None:
        raise SourceError.said(
            pt=f"{self.file.path.name}: não sei usar `{subject}` deste arquivo",
            en=f"{self.file.path.name}: this file's `{subject}` is missing or not understood",
            hint_pt="use outro GGUF do mesmo modelo, ou a pasta dele em safetensors",
            hint_en="use another GGUF of the same model, or its safetensors folder",
            where=self.what,
        )


def _common(keys: _Keys) -> dict[str, Any]:
    tensors = keys.file.tensors
    heads = keys("attention.head_count")
    values = {
        "hidden_size": keys("embedding_length"),
        "intermediate_size": keys.get("feed_forward_length", 0),
        "num_hidden_layers": keys("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys),
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": keys.token("eos"),
        "pad_token_id": keys.token("padding"),
    }
    if "token_embd.weight" not in tensors:
        keys.refuse("token_embd.weight")
    return values | {"vocab_size": tensors["token_embd.weight"].shape[0]}


def _head_dim(keys: _Keys) -> int:
    """`rope.dimension_count` is the head's size only where all of it is rotated, which Phi's is not."""
    given = keys.get("attention.key_length")
    if given is None and keys.file.architecture not in ("phi3",):
        given = keys.get("rope.dimension_count")
    return int(given or keys("embedding_length") // keys("attention.head_count"))


def _ropes(keys: _Keys) -> dict[str, Any]:
    scaling = _rope_scaling(keys)
    theta = keys.get("rope.freq_base", 10000.0)
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor")
    original = keys.get("rope.scaling.original_context_length")
    if (factors := keys.values("rope_freqs.weight")) is not None:
        return _llama3_rope(keys, factors)
    if (short := keys.values("rope_factors_short.weight")) is not None:
        long = keys.values("rope_factors_long.weight")
        if long is None:
            keys.refuse("rope_factors_long.weight")
        assert long is not None
        return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    keys.refuse(f"rope.scaling.type = {kind}")
    return None


def _llama3_rope(keys: _Keys, factors: torch.Tensor) -> dict[str, Any] | None:
    """The rule (arXiv 2407.21783, §3.4; transformers' "llama3") whose factors these are."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    largest = float(factors.max())
    if bool((factors == 1).all()):
        return None
    rule = {"rope_type": "llama3", "factor": largest, **LLAMA3_ROPE}
    dim, theta = 2 * len(factors), keys.get("rope.freq_base", 10000.0)
    length = keys("context_length")
    config = LlamaConfig(head_dim=dim, rope_theta=theta, rope_scaling=dict(rule), max_position_embeddings=length)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, dim, 2) / dim)
    if not torch.allclose(plain / frequencies, factors, rtol=1e-3):
        keys.refuse("rope_freqs.weight")
    return rule


def _nothing(keys: _Keys) -> dict[str, Any]:
    return {}


def _phi3(keys: _Keys) -> dict[str, Any]:
    rotated = keys.get("rope.dimension_count")
    original = keys.get("rope.scaling.original_context_length")
    window = keys.get("attention.sliding_window")
    return {
        "partial_rotary_factor": rotated / _head_dim(keys) if rotated else 1.0,
        "original_max_position_embeddings": original or keys("context_length"),
        "sliding_window": window or None,
    }


def _qwen(keys: _Keys) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _qwen3moe(keys: _Keys) -> dict[str, Any]:
    return _qwen(keys) | {
        "num_experts": keys("expert_count"),
        "num_experts_per_tok": keys("expert_used_count"),
        "moe_intermediate_size": keys("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(keys: _Keys) -> dict[str, Any]:
    return _qwen3moe(keys) | {
        "shared_expert_intermediate_size": keys("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _granite(keys: _Keys) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys("embedding_scale"),
        "residual_multiplier": keys("residual_scale"),
        "attention_multiplier": keys("attention.scale"),
        "logits_scaling": keys("logit_scale"),
    }


def _gemma(keys: _Keys) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def _query_scalar(keys: _Keys, layers_of_27b: int) -> float:
    """The 27B models alone scale by hidden size per head, which llama.cpp tells by their number of layers."""
    if keys("block_count") == layers_of_27b:
        return float(keys("embedding_length") // keys("attention.head_count"))
    return _head_dim(keys)


def _gemma2(keys: _Keys) -> dict[str, Any]:
    return _gemma(keys) | {
        "sliding_window": keys("attention.sliding_window"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(keys, 46),
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        keys.refuse("gemma3.attention.sliding_window_pattern")
    return _gemma(keys) | {
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "sliding_window": keys("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "rope_theta": keys.get("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scalar(keys, 62),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
    }


EXTRA: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
    "granite": _granite,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
