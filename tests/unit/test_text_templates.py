"""Tokens and targets under the chat formats in use: ids as apply_chat_template gives them, answers and their ends
learned, nothing else; cases C03, C04, and the end-token and double-BOS failures of other trainers."""

import re
from pathlib import Path
from typing import Any

import pytest
from text_cases import (
    GEMMA,
    LLAMA3,
    MISTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    REASONER,
    SILENT,
    ZEPHYR,
    bare_tokenizer,
    chat,
    dataset,
    learned,
    tokenizer,
    write_jsonl,
)

from lora_trainer.errors import ConfigError, DataError, SourceError
from lora_trainer.text import templates
from lora_trainer.text.templates import Refused, choose

TWO = ("oi", "olá", "tudo bem?", "sim, tudo bem.")

ENDS = {
    "qwen2": (QWEN2, ["olá<|im_end|>", "sim, tudo bem.<|im_end|>"]),
    "qwen3": (QWEN3, ["olá<|im_end|>", "<think>\n\n</think>\n\nsim, tudo bem.<|im_end|>"]),
    "llama3": (LLAMA3, ["olá<|eot_id|>", "sim, tudo bem.<|eot_id|>"]),
    "mistral": (MISTRAL, [" olá<|endoftext|>", " sim, tudo bem.<|endoftext|>"]),
    "gemma": (GEMMA, ["olá<end_of_turn>", "sim, tudo bem.<end_of_turn>"]),
    "phi3": (PHI3, ["olá<|end|>", "sim, tudo bem.<|end|>", "<|endoftext|>"]),
    "zephyr": (ZEPHYR, ["\nolá<|endoftext|>", "\nsim, tudo bem.<|endoftext|>"]),
    "reasoner": (REASONER, ["olá<|endoftext|>", "sim, tudo bem.<|endoftext|>"]),
}

ENDINGS = {"<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"}


def one(tmp_path: Path, row: dict[str, Any], tok: Any, **options: Any) -> Any:
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [row]), tok, **options)
    assert len(data.examples) == 1
    return data.examples[0]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_ids_are_those_of_inference_and_answers_are_learned_with_their_ends(
    name: str, adds_bos: bool, tmp_path: Path
) -> None:
    template, expected = ENDS[name]
    tok = tokenizer(template, adds_bos=adds_bos)
    row = chat(*TWO)
    example = one(tmp_path, row, tok)
    ids = tok.apply_chat_template(row["messages"], return_dict=False, date_string="26 Jul 2024")
    assert example.input_ids.tolist() == ids
    assert example.input_ids.tolist().count(tok.bos_token_id) <= 1
    assert learned(example, tok) == expected
    assert example.labels[example.learned].tolist() == example.input_ids[example.learned].tolist()
    assert set(example.labels[~example.learned].tolist()) == {-100}


@pytest.mark.parametrize("name", ENDS)
def test_only_the_last_answer(name: str, tmp_path: Path) -> None:
    template, expected = ENDS[name]
    tok = tokenizer(template)
    assert learned(one(tmp_path, chat(*TWO), tok, loss_on="last"), tok) == expected[1:]


def test_all_is_everything_but_the_first_token(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    example = one(tmp_path, chat(*TWO), tok, loss_on="all")
    assert not example.learned[0]
    assert example.learned[1:].all()


@pytest.mark.parametrize(
    ("name", "source"),
    [("chatml", QWEN2), ("llama3", LLAMA3), ("mistral", MISTRAL), ("gemma", GEMMA), ("zephyr", ZEPHYR)],
)
def test_our_templates_write_what_the_families_write(name: str, source: str, tmp_path: Path) -> None:
    """Up to what a family adds of its own: a default system prompt, a date."""
    tok = tokenizer(source)
    theirs, ours = choose(tok, "auto", {"messages"}), choose(tok, name, {"messages"})
    turns = [templates.Turn("user", "oi"), templates.Turn("assistant", "olá")]
    tail = ours.render(turns).removeprefix(tok.bos_token)
    assert theirs.render(turns).endswith(tail)


def test_reasoning_in_an_answer_is_learned_where_the_template_keeps_it(tmp_path: Path) -> None:
    tok = tokenizer(QWEN3)
    row = chat("oi", "<think>\nele disse oi\n</think>\n\nolá", "e?", "<think>\nhm\n</think>\n\nsim")
    assert learned(one(tmp_path, row, tok), tok) == ["olá<|im_end|>", "<think>\nhm\n</think>\n\nsim<|im_end|>"]


def test_pad_that_is_eos_does_not_hide_the_end(tmp_path: Path) -> None:
    tok = tokenizer(ZEPHYR, pad_token="<|endoftext|>")
    assert tok.pad_token_id == tok.eos_token_id
    assert learned(one(tmp_path, chat(*TWO), tok), tok) == ENDS["zephyr"][1]


def test_answers_that_look_like_the_template_are_found(tmp_path: Path) -> None:
    """The answer repeats the prompt and the closing marks; the learned text is still the answer."""
    tok = tokenizer(QWEN2)
    answer = "<|im_end|>\n<|im_start|>assistant\noi"
    assert learned(one(tmp_path, chat("oi", answer), tok), tok) == [answer + "<|im_end|>"]


def test_answers_keep_their_own_white_space(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    assert learned(one(tmp_path, chat("oi", "  olá\n\n"), tok), tok)[0].endswith("olá\n\n<|im_end|>")
    trims = tokenizer(GEMMA)
    assert learned(one(tmp_path, chat("oi", "  olá\n\n"), trims), trims) == ["olá<end_of_turn>"]


# -- system prompts


def test_system_prompts_go_where_the_template_puts_them(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [chat(*TWO, system="Seja breve.")]), tok)
    assert tok.decode(data.examples[0].input_ids).startswith("<|im_start|>system\nSeja breve.<|im_end|>")
    assert not any("sistema" in note for note in data.notes.notes)


@pytest.mark.parametrize("source", [GEMMA, MISTRAL, SILENT])
def test_system_prompts_refused_or_left_out_by_the_template_go_into_the_question(source: str, tmp_path: Path) -> None:
    tok = tokenizer(source)
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [chat(*TWO, system="Seja breve.")]), tok)
    assert "Seja breve.\n\noi" in tok.decode(data.examples[0].input_ids)
    assert any("instrução de sistema" in note for note in data.notes.notes)


def test_a_conversation_that_the_template_refuses_is_dropped_with_its_reason(tmp_path: Path) -> None:
    greeting = {"messages": [{"role": "assistant", "content": "bem-vindo"}, *chat("oi", "olá")["messages"]]}
    path = write_jsonl(tmp_path / "d.jsonl", [greeting, chat("oi", "olá")])
    data = dataset(path, tokenizer(MISTRAL))
    assert [e.where for e in data.examples] == ["d.jsonl:2"]
    ((reason, places),) = data.notes.excluded.items()
    assert "must alternate" in reason
    assert places == ["d.jsonl:1"]
    tok = tokenizer(QWEN2)
    assert learned(dataset(path, tok).examples[0], tok) == ["bem-vindo<|im_end|>", "olá<|im_end|>"]


def test_a_template_without_the_answers_is_refused() -> None:
    source = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="não escreve a resposta"):
        choose(tokenizer(source), "auto", {"messages"})
    with pytest.raises(DataError, match="não funciona"):
        choose(tokenizer("{% for m in messages %}"), "auto", {"messages"})


def test_templates_know_no_clock() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    turns = [templates.Turn("user", "a"), templates.Turn("assistant", "b")]
    assert choose(tokenizer(source), "auto", {"messages"}).render(turns) == "2024-07-26ab"
    assert "Today Date: 26 Jul 2024" in choose(tokenizer(LLAMA3), "auto", {"messages"}).render(turns)


# -- no template (C03)


def test_conversations_without_a_template_are_refused_with_the_list(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [chat("oi", "olá")])
    with pytest.raises(DataError) as error:
        dataset(path, tokenizer())
    text = str(error.value)
    assert "dados.formato_conversa" in text
    assert all(name in text for name in ("chatml", "llama3", "simples", "nenhum"))


@pytest.mark.parametrize("name", templates.available())
@pytest.mark.parametrize("make", [tokenizer, bare_tokenizer])
def test_each_of_our_templates_teaches_the_end_on_any_tokenizer(name: str, make: Any, tmp_path: Path) -> None:
    tok = make()
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [chat("oi: ", "olá", "e agora? ", "tudo bem.")]), tok, chat_template=name)
    example = data.examples[0]
    answers = [run for run in learned(example, tok) if run not in ("<|endoftext|>", "</s>")]
    assert [re.sub(r"<.*", "", answer, flags=re.DOTALL).strip() for answer in answers] == ["olá", "tudo bem."]
    last = tok.added_tokens_decoder[int(example.input_ids[example.learned][-1])]
    assert last.content in ENDINGS
    assert example.input_ids.tolist().count(tok.bos_token_id) <= 1
    saved = make()
    data.template.install(saved)
    assert saved.chat_template == data.template.source


def test_an_answer_swallowed_by_the_prompt_s_last_token_is_told(tmp_path: Path) -> None:
    tok = tokenizer()
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "men", "completion": "ina"}] * 2), tok)
    assert learned(data.examples[0], tok) == ["<|endoftext|>"]
    assert any("se funde" in warning and "d.jsonl:1" in warning for warning in data.notes.warnings)


def test_marks_that_are_no_tokens_are_learned_as_text_and_closed_by_eos(tmp_path: Path) -> None:
    tok = bare_tokenizer()
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [chat(*TWO)]), tok, chat_template="chatml")
    # EOS would never be reached over a line break that is not learned
    assert learned(data.examples[0], tok) == ["olá<|im_end|>", "sim, tudo bem.<|im_end|>\n</s>"]
    assert data.examples[0].input_ids.tolist()[0] == tok.bos_token_id
    assert any("<|im_start|>" in warning and "simples" in warning for warning in data.notes.warnings)


def test_an_unknown_template_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [chat("oi", "olá")])
    with pytest.raises(ConfigError, match="chatlm") as error:
        dataset(path, tokenizer(), chat_template="chatlm")
    assert "chatml" in str(error.value)


def test_question_and_answer_need_no_template(tmp_path: Path) -> None:
    tok = tokenizer()
    alpaca = one(tmp_path, {"instruction": "Traduza", "input": "casa", "output": "house"}, tok)
    assert learned(alpaca, tok) == ["house<|endoftext|>"]
    assert tok.decode(alpaca.input_ids).startswith("### Instruction:\nTraduza\n\ncasa\n\n### Response:\nhouse")
    plain = one(tmp_path, {"prompt": "2+2=", "completion": "4"}, tok)
    assert tok.decode(plain.input_ids) == "2+2=4<|endoftext|>"
    assert learned(plain, tok) == ["4<|endoftext|>"]


# -- plain text


@pytest.mark.parametrize("adds_bos", [False, True])
def test_plain_text_has_one_bos_and_one_eos_and_is_never_lost(adds_bos: bool, tmp_path: Path) -> None:
    tok = tokenizer(adds_bos=adds_bos)
    words = " ".join(f"palavra{i}" for i in range(60))
    data = dataset(write_jsonl(tmp_path / "d.jsonl", [{"text": words}, {"text": "<|bos|>curto"}]), tok, max_length=32)
    long = [e for e in data.examples if e.where == "d.jsonl:1"]
    assert len(long) > 3
    assert max(map(len, long)) == 32
    body = [e.input_ids.tolist()[1:] if adds_bos else e.input_ids.tolist() for e in long]
    assert tok.decode([i for ids in body for i in ids]) == words + "<|endoftext|>"
    assert all((e.input_ids[0] == tok.bos_token_id) == adds_bos for e in long)
    assert all(e.learned[1:].all() and not e.learned[0] for e in long)
    short = data.examples[-1].input_ids.tolist()
    assert short.count(tok.bos_token_id) == 1
    assert short[-1] == tok.eos_token_id
    assert data.counts.split == 1
    assert data.counts.targets_lost == 0


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="eos_token"):
        one(tmp_path, {"text": "oi"}, tokenizer(eos_token=None))


def test_a_span_that_cannot_be_found_is_refused_not_guessed() -> None:
    from lora_trainer.text.spans import find_spans

    source = "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    template = choose(tokenizer(source), "auto", {"messages"})
    turns = [templates.Turn(("user", "assistant")[i % 2], text) for i, text in enumerate(TWO)]
    with pytest.raises(Refused):
        find_spans(template, turns, template.render(turns), [1, 3])
