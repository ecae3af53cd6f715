"""Tokenizers, templates and data files for the text tests: real `tokenizers` classes, trained on a few lines."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lora_trainer.config.schema import DataConfig
from lora_trainer.text.dataset import TextDataset, build
from lora_trainer.text.tokens import Tokenised

LINES = [
    "o gato dorme na casa azul e a menina lê um livro",
    "what is the capital of France? The capital of France is Paris.",
    "olá, tudo bem? sim, tudo bem. Não é difícil: coração, ação, pão.",
    "### Instruction: user assistant system Traduza casa house",
]

# -- chat templates as the model families publish their formats, each reduced to its text turns

QWEN2 = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (  # earlier turns lose their reasoning, the last one always has some: not prefix-stable
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set body = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}{% set think = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m['content'] else '' %}"
    "{{ '<|im_start|>assistant\n<think>\n' + think + '\n</think>\n\n' + body }}"
    "{% else %}{{ '<|im_start|>assistant\n' + body }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim "
    "+ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim "
    "+ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (  # EOS only at the very end, after the token that closes each turn: not prefix-stable
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
SILENT = (  # leaves system prompts out without a word
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
REASONER = (  # prompts with more than it writes
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
SPECIAL = [
    *("<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("[INST]", "[/INST]"),
]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return str(tokenizer.to_str())


def tokenizer(template: str | None = None, *, adds_bos: bool = False, **changes: Any) -> Any:
    """A byte-level BPE tokenizer. `changes` override its special tokens (None takes one away)."""
    backend = Tokenizer.from_str(_trained())
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
        )
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>", **changes}
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=64, **{name: token for name, token in tokens.items() if token}
    )
    out.chat_template = template
    return out


def bare_tokenizer() -> Any:
    """A base model's: BOS, EOS and no chat tokens at all; spaces as sentencepiece writes them."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    signs = [AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")]
    alphabet = [chr(code) for code in range(32, 127)] + ["▁", "\n"]
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(vocab_size=500, special_tokens=signs, initial_alphabet=alphabet, show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# -- data


def chat(*pairs: str, system: str = "") -> dict[str, Any]:
    """Messages that alternate user and assistant."""
    turns = [{"role": "system", "content": system}] if system else []
    turns += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(pairs)]
    return {"messages": turns}


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


def dataset(path: Path, tokenizer: Any, **options: Any) -> TextDataset:
    return build(DataConfig(data_dir=str(path), **options), tokenizer)


def learned(example: Tokenised, tokenizer: Any) -> list[str]:
    """The runs of targets, decoded."""
    runs: list[list[int]] = []
    before = False
    for token, mark in zip(example.input_ids.tolist(), example.learned.tolist(), strict=True):
        if mark and not before:
            runs.append([])
        if mark:
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run) for run in runs]


def made(lengths: Sequence[int]) -> list[Tokenised]:
    """Examples of these lengths, every token different from example to example."""
    out = []
    for number, length in enumerate(lengths):
        ids = np.arange(length, dtype=np.int32) + 1000 * (number + 1)
        mask = np.ones(length, dtype=np.bool_)
        mask[0] = False
        out.append(Tokenised(ids, mask, f"d.jsonl:{number + 1}", str(number), f"u{number}"))
    return out
