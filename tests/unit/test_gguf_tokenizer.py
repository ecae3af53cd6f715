"""The tokenizer and chat template that a GGUF file carries."""

import logging
from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lora_trainer.errors import SourceError
from lora_trainer.files.gguf_reader import open_gguf
from lora_trainer.files.gguf_tokenizer import tokenizer

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NORMAL, CONTROL = 1, 3


def write_tokenizer(path: Path, rule: str, **changes: object) -> Path:
    """A byte-level vocabulary with two merges of digits and one across a space."""
    space = bytes_to_unicode()[ord(" ")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *bytes_to_unicode().values(), "12", f"{space}1", "ol"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(words)
    writer.add_token_types([CONTROL] * len(special) + [NORMAL] * (len(words) - len(special)))
    writer.add_token_merges(["1 2", f"{space} 1", "o l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(path: Path, text: str) -> list[str]:
    made = tokenizer(open_gguf(path))
    return made.convert_ids_to_tokens(made(text).input_ids)


def test_special_tokens_template_and_length(tmp_path):
    made = tokenizer(open_gguf(write_tokenizer(tmp_path / "m.gguf", "gpt-2")))
    assert (made.bos_token, made.eos_token, made.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert made.chat_template == TEMPLATE
    assert made.model_max_length == 512
    text = made.apply_chat_template([{"role": "user", "content": "olá"}], tokenize=False)
    ids = made(text, add_special_tokens=False).input_ids
    assert (ids[0], ids.count(2)) == (1, 1)
    assert made.decode(ids) == text
    assert made("ol").input_ids == [len(made) - 1]


def test_words_are_cut_as_the_file_says(tmp_path, caplog):
    each = write_tokenizer(tmp_path / "each.gguf", "smollm")
    whole = write_tokenizer(tmp_path / "whole.gguf", "gpt-2")
    assert tokens(whole, "12 1") == ["12", "Ġ1"]
    assert tokens(each, "12 1") == ["1", "2", "Ġ", "1"]
    assert not caplog.records


def test_an_unknown_rule_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lora_trainer"):
        assert tokens(write_tokenizer(tmp_path / "m.gguf", "novidade"), "12") == ["12"]
    assert "'novidade'" in caplog.text


def test_a_file_without_a_tokenizer(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="não traz tokenizador"):
        tokenizer(open_gguf(tmp_path / "m.gguf"))


def test_a_kind_of_tokenizer_that_transformers_cannot_build(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="rwkv"):
        tokenizer(open_gguf(tmp_path / "m.gguf"))
