"""A user's language project in miniature: a tiny random Llama with a real tokenizer, conversations, and a config file."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
PAIRS = [(f"pergunta número {n}?", f"a resposta {n} é simples: " + "sim " * (1 + n % 5)) for n in range(12)]


def write_tokenizer(folder: Path) -> int:
    """Byte-level BPE with a ChatML template; returns the size of its vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text for pair in PAIRS for text in pair], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0], pad_token=SPECIAL[1])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_base(folder: Path, **changes: Any) -> Path:
    """A Llama of 4 layers and 64 channels."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**{**sizes, "num_key_value_heads": 2, "vocab_size": vocabulary, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write base, conversations and `lora.yaml`; `sections` are laid over the usual ones."""
    write_base(folder / "base")
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in PAIRS]
    (folder / "dados.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    config: dict[str, dict[str, Any]] = {
        "modelo": {"modelo_base": "base", "classificacao_lora": 4, "alfa_lora": 8},
        "dados": {"diretorio_dados": "dados.jsonl", "comprimento_maximo": 64, "tamanho_lote": 2},
        "treino": {"epocas": 4, "taxa_aprendizado": 1e-2, "passos_acumulacao_gradiente": 2},
        "saida": {"nome": "lora", "precisao": "fp32"},
        "sistema": {"semente": 7, "dispositivo": "cpu"},
    }
    for name, options in sections.items():
        config[name] = {**config.get(name, {}), **options}
    path = folder / "lora.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path
