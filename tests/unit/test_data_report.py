"""What the user is told before training. Cases B02 (75 tokens), A06 and H03 (the arithmetic of steps)."""

import pytest
from data_cases import built, cap, good, img

from lora_trainer.data.batches import BatchPlan
from lora_trainer.data.report import summary_lines, token_lines
from lora_trainer.errors import set_language


def count(text: str) -> int:
    return len(text.split())


def words(number: int, last: str) -> str:
    return " ".join(["p"] * (number - 1) + [last])


@pytest.mark.parametrize(("limit", "long", "tail"), [(75, 4, "p p p"), (225, 1, "p p p")])
def test_exact_edges_of_the_token_limit(tmp_path, limit, long, tail):
    for number in (74, 75, 76, 150, 151, 300):
        img(tmp_path / f"ds/{number}.png")
        cap(tmp_path / f"ds/{number}.txt", words(number, f"fim{number}"))
    (line,) = token_lines(built(tmp_path / "ds"), count, limit)
    assert f"{long} legenda" in line
    assert f"{limit} tokens; a maior: 300.txt (300)" in line
    assert "fim300" in line
    assert tail in line


def test_nothing_is_said_when_all_fit(tmp_path):
    assert token_lines(built(good(tmp_path / "ds")), count, 75) == []


def test_the_dropped_words_are_exactly_those_beyond_the_limit(tmp_path):
    img(tmp_path / "ds/a.png")
    cap(tmp_path / "ds/a.txt", "um dois três quatro cinco")
    (line,) = token_lines(built(tmp_path / "ds"), count, 3)
    assert line == "1 legenda passa de 3 tokens; a maior: a.txt (5). Fica de fora: “quatro cinco”"


def test_summary(tmp_path):
    ds = tmp_path / "ds"
    good(ds / "10_ohwx gato")
    good(ds / "CROP", 2)
    img(ds / "CROP/sem.png", 512, 768)
    img(ds / "CROP/mini.png", 10, 10)
    plan = BatchPlan(built(ds), 4, 3, seed=0)
    text = "\n".join(summary_lines(plan, epochs=5))
    assert "10_ohwx gato: 4 imagens × 10" in text
    assert "CROP: 3 imagens × 1" in text
    assert "legendas: 6 de .txt, 1 sem texto" in text
    assert "fora do treino (lado menor que 64 (dados.lado_minimo)): 1: CROP/mini.png (10x10)" in text
    assert "256x256           6    0.0% (0.0%)" in text
    assert "384x576           1    0.0% (0.0%)" in text
    assert "43 exemplos por época ÷ lote 4 = 12 micro-lotes (1 a mais por haver vários buckets)" in text
    assert "÷ acumulação 3 = 4 passos por época" in text
    assert "5 épocas × 4 = 20 passos do otimizador" in text
    assert plan.steps_per_epoch == 4


def test_english(tmp_path):
    set_language("en")
    text = "\n".join(summary_lines(BatchPlan(built(good(tmp_path / "ds", 2)), 1, 1, 0), epochs=1))
    assert "captions: 2 from .txt" in text
    assert "1 epoch × 2 = 2 optimizer steps" in text
    assert not any(word in text for word in ("imagens", "legendas", "passos"))
