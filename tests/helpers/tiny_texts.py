"""Tiny text encoders: CLIP, T5 and language models, with real tokenizers of few words, as folders and files have them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import T5EncoderModel, T5Tokenizer

from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.parts import build_t5
from lora_trainer.bases.tiny import Encoder

from . import llm_files
from .original_checkpoint import write_words

Config = dict[str, Any]
PIECES = ["▁a", "▁photo", "▁of", "▁cat", "▁on", "▁red", ",", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789"]


def same(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Text:
    """How encoders of one make are built and written."""

    tokenizer: str
    """transformers' class."""
    write_tokenizer: Callable[[Path, Encoder], int]
    """Returns the size of its vocabulary."""
    config: Callable[[Config, Encoder, int], Config]
    """Of the released one, for a vocabulary of so many words."""
    build: Callable[[Config, Encoder], nn.Module]
    stored: Callable[[nn.Module], dict[str, Tensor]]
    """As its file names it."""
    saved: Callable[[nn.Module], nn.Module] = same
    """As a diffusers folder has it."""
    cut: Callable[[nn.Module], nn.Module] = same
    """As the family cuts it."""
    large: bool = True
    """Its file may be in fp8."""
    drawn: bool = True
    """Random numbers are still to be drawn once it is built."""


def write_clip_tokenizer(folder: Path, encoder: Encoder) -> int:
    size = write_words(folder)
    if encoder.pad:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"pad_token": encoder.pad}), encoding="utf-8")
    return size


def clip_config(released: Config, encoder: Encoder, words: int) -> Config:
    marks = {"vocab_size": words, "bos_token_id": words - 2, "eos_token_id": words - 1}
    return {**released, **marks, **({} if encoder.pad else {"pad_token_id": words - 1}), **encoder.numbers}


def clip_state(module: nn.Module) -> dict[str, Tensor]:
    """Every key of the transformer under `text_model.`, the projection outside it."""
    state = {key.removeprefix("text_model."): value for key, value in module.state_dict().items()}
    return {key if key.startswith("text_projection") else f"text_model.{key}": value for key, value in state.items()}


def write_t5_tokenizer(folder: Path, encoder: Encoder) -> int:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -float(i)) for i, word in enumerate(PIECES))]
    T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(folder)
    return len(pieces)


def whole_t5(module: Any) -> nn.Module:
    whole = T5EncoderModel(module.config)
    whole.load_state_dict({**module.state_dict(), "shared.weight": module.encoder.embed_tokens.weight})
    return whole


def t5_state(module: nn.Module) -> dict[str, Tensor]:
    state = dict(module.state_dict())
    return {"shared.weight": state.pop("encoder.embed_tokens.weight"), **state}


CLIP = Text(
    "CLIPTokenizer", write_clip_tokenizer, clip_config, lambda config, _: BUILDERS["text_encoder"](config), clip_state, large=False
)
T5 = Text(
    "T5TokenizerFast", write_t5_tokenizer, lambda released, encoder, words: {**released, "vocab_size": words, **encoder.numbers},
    lambda config, _: build_t5(config), t5_state, saved=whole_t5,
)  # fmt: skip
LANGUAGE_MODEL = Text(
    "Qwen2Tokenizer", lambda folder, encoder: llm_files.write_qwen_tokenizer(folder, encoder.texts, encoder.special),
    lambda _, encoder, words: llm_files.tiny_text_config(encoder.model, words, **encoder.numbers),
    lambda config, encoder: llm_files.whole_model(encoder.model, config), llm_files.comfy_state, cut=llm_files.body_of, drawn=False,
)  # fmt: skip
MISTRAL = replace(
    LANGUAGE_MODEL, tokenizer="PreTrainedTokenizerFast", saved=llm_files.with_vision,
    write_tokenizer=lambda folder, _: llm_files.write_mistral_tokenizer(folder),
)  # fmt: skip
_TEXTS = {"clip": CLIP, "t5": T5, "mistral": MISTRAL}


def text_of(encoder: Encoder) -> Text:
    return _TEXTS.get(encoder.model, LANGUAGE_MODEL)
