"""From a config to a tokenised set: the cut and what it costs (case C01), the held-out part, the report, the size."""

import json
from pathlib import Path
from typing import Any

import pytest
from text_cases import QWEN2, chat, dataset, learned, tokenizer, write_jsonl

from lora_trainer.config.loading import load
from lora_trainer.config.schema import DataConfig
from lora_trainer.errors import ConfigError, DataError, set_language
from lora_trainer.text.batches import TextBatchPlan
from lora_trainer.text.dataset import build
from lora_trainer.text.report import facts, marked, summary_lines

C01 = [chat("palavra " * 500, "sim"), chat("oi", "olá")]


def write(tmp_path: Path, rows: list[Any]) -> Path:
    return write_jsonl(tmp_path / "d.jsonl", rows)


# -- the cut (C01)


def test_rows_whose_answer_is_cut_off_are_told_and_dropped(tmp_path: Path) -> None:
    data = dataset(write(tmp_path, C01), tokenizer(QWEN2), max_length=64)
    assert [e.where for e in data.examples] == ["d.jsonl:2"]
    (warning,) = data.notes.warnings
    assert warning.startswith("1 de 2 exemplos sem resposta depois do corte em 64 tokens: d.jsonl:1 (")
    assert "descartados" in warning
    plan = TextBatchPlan(data, 1, 1, 0)
    assert any("ok 1 / descartados 1" in line for line in summary_lines(plan, 1))


def test_or_refused_by_a_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 de 2 exemplos.*d\.jsonl:1") as error:
        dataset(write(tmp_path, C01), tokenizer(QWEN2), max_length=64, rows_without_target="stop")
    assert "dados.linhas_sem_alvo" in str(error.value)
    assert "dados.comprimento_maximo" in str(error.value)


def test_all_rows_so_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nenhum exemplo tem resposta") as error:
        dataset(write(tmp_path, C01[:1]), tokenizer(QWEN2), max_length=64)
    assert "dados.comprimento_maximo" in str(error.value)


def test_a_cut_answer_is_counted_and_does_not_learn_to_stop(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    path = write(tmp_path, [chat("oi", "palavra " * 40), chat("oi", "olá")])
    whole, data = dataset(path, tok), dataset(path, tok, max_length=100)
    cut = data.examples[0]
    assert len(cut) == 100
    assert cut.input_ids.tolist() == whole.examples[0].input_ids.tolist()[:100]
    assert "<|im_end|>" not in learned(cut, tok)[0]
    assert data.counts.truncated == ["d.jsonl:1"]
    assert data.counts.tokens_lost == len(whole.examples[0]) - 100
    assert data.counts.targets_lost == whole.examples[0].targets - cut.targets > 0
    assert facts(TextBatchPlan(data, 1, 1, 0))["targets_lost"] == data.counts.targets_lost
    line = next(line for line in summary_lines(TextBatchPlan(data, 1, 1, 0), 1) if "cortado" in line)
    assert f"{data.counts.targets_lost} de resposta" in line


# -- held out


def test_the_held_out_part_follows_content(tmp_path: Path) -> None:
    rows = [chat(f"pergunta {i}", f"resposta {i}") for i in range(20)]
    tok = tokenizer(QWEN2)
    data = dataset(write(tmp_path, rows), tok, validation_fraction=0.2)
    assert (len(data.examples), len(data.validation)) == (16, 4)
    turned = dataset(write(tmp_path, rows[::-1]), tok, validation_fraction=0.2)
    other = dataset(write(tmp_path, rows), tokenizer(), validation_fraction=0.2, chat_template="plain")
    assert {e.uid for e in data.validation} == {e.uid for e in turned.validation}
    assert {e.content for e in data.validation} == {e.content for e in other.validation}
    doubled = dataset(write(tmp_path, rows + rows), tok, validation_fraction=0.2)
    assert {e.content for e in doubled.validation} == {e.content for e in data.validation}
    assert not {e.content for e in doubled.examples} & {e.content for e in doubled.validation}
    assert len({e.uid for e in doubled.examples}) == 32


def test_pieces_of_one_text_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"texto {i} " * 30} for i in range(6)]
    data = dataset(write(tmp_path, rows), tokenizer(), max_length=32, validation_fraction=0.3)
    assert not {e.where for e in data.examples} & {e.where for e in data.validation}
    assert len(data.validation) > 2


def test_one_example_cannot_be_held_out(tmp_path: Path) -> None:
    data = dataset(write(tmp_path, C01[1:]), tokenizer(QWEN2), validation_fraction=0.5)
    assert (len(data.examples), len(data.validation)) == (1, 0)
    assert any("fracao_validacao" in warning for warning in data.notes.warnings)


# -- identity


def test_the_fingerprint_changes_with_what_is_trained_on(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    path = write(tmp_path, [chat("oi", "olá"), chat("e?", "sim")])
    first = dataset(path, tok).fingerprint()
    assert dataset(path, tok).fingerprint() == first
    changed: list[dict[str, Any]] = [{"loss_on": "all"}, {"max_length": 512}, {"packing": "no"}, {"repeats": 2}]
    changed += [{"chat_template": "zephyr"}, {"validation_fraction": 0.5}]
    prints = [dataset(path, tok, **options).fingerprint() for options in changed]
    assert first not in prints
    write(tmp_path, [chat("oi", "olá!"), chat("e?", "sim")])
    assert dataset(path, tok).fingerprint() != first


def test_a_missing_path_names_its_option() -> None:
    with pytest.raises(ConfigError, match="diretorio_dados"):
        build(DataConfig(), tokenizer(QWEN2))


def test_the_options_in_portuguese(tmp_path: Path) -> None:
    (tmp_path / "base.safetensors").touch()
    write(tmp_path / "textos", [chat("oi", "olá")])
    (tmp_path / "c.yaml").write_text(
        """modelo: {modelo_base: ./base.safetensors}
dados: {diretorio_dados: ./textos, formato_texto: conversas, formato_conversa: simples, perda_em: última,
        comprimento_maximo: 1e3, empacotar: nao, linhas_ruins: pular, linhas_sem_alvo: parar}
""",
        encoding="utf-8",
    )
    config = load(tmp_path / "c.yaml", []).config.data
    data = build(config, tokenizer())
    assert (data.template.name, data.packing, data.max_length) == ("plain", False, 1000)
    assert (config.text_format, config.loss_on) == ("messages", "last")
    assert (config.bad_rows, config.rows_without_target) == ("skip", "stop")


# -- the report


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        (
            "pt",
            ["arquivos: d.jsonl", "reconhecido: 3 messages", "formato de conversa: o do tokenizador", "tokens por época"],
        ),
        ("en", ["files: d.jsonl", "recognised: 3 messages", "chat template: the tokenizer's own", "tokens per epoch"]),
    ],
)
def test_the_report(language: str, expected: list[str], tmp_path: Path) -> None:
    set_language(language)
    tok = tokenizer(QWEN2)
    rows = [chat("oi", "olá"), chat("oi", "olá, tudo bem?"), chat("oi " * 30, "olá")]
    data = dataset(write(tmp_path, rows), tok, max_length=256)
    lines = summary_lines(TextBatchPlan(data, 1, 2, 0), 3, tok)
    text = "\n".join(lines)
    assert all(part in text for part in expected)
    bars = [line for line in lines if "█" in line]
    assert sum(int(bar.split()[-1]) for bar in bars) == 3
    assert "⟦olá<|im_end|>⟧" in text
    assert "256" in text
    figures = facts(TextBatchPlan(data, 1, 2, 0))
    assert json.loads(json.dumps(figures)) == figures
    assert (figures["rows"], figures["examples"], figures["steps_per_epoch"]) == (3, 3, 1)
    assert ("1 passo por época" in text) or ("1 step per epoch" in text)


def test_the_shown_example_marks_what_is_learned(tmp_path: Path) -> None:
    tok = tokenizer(QWEN2)
    data = dataset(write(tmp_path, [chat("oi", "olá", "e?", "sim")]), tok)
    shown = marked(data.examples[0], tok)
    assert shown.replace("⟦", "").replace("⟧", "") == tok.decode(data.examples[0].input_ids)
    assert shown.count("⟦") == 2
    assert "assistant\n⟦sim<|im_end|>⟧\n" in shown


# -- size


def test_a_set_holds_five_bytes_a_token(tmp_path: Path) -> None:
    rows = [chat(f"pergunta {i} " * 8, f"resposta {i} " * 20) for i in range(200)]
    data = dataset(write(tmp_path, rows), tokenizer(QWEN2))
    assert sum(e.input_ids.nbytes + e.learned.nbytes for e in data.examples) == 5 * sum(data.lengths)
    assert all(e.input_ids.base is None and e.learned.base is None for e in data.examples)
