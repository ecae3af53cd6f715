"""A language LoRA from the command line to files that other programs load."""

import json
from pathlib import Path

import peft
import pytest
import torch
from helpers.gguf_files import write_model
from helpers.language import make, write_base
from recipe import events, kill_after_step, run, start
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_trainer.cli import main
from lora_trainer.config.declared import sharing
from lora_trainer.techniques._quantizer import BASE


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "saida" / "lora" / "lora-peft" / "adapter_model.safetensors")


def test_trains_and_peft_loads_the_folder(tmp_path: Path) -> None:
    samples = {"prompts": ["pergunta número 3?"], "tokens_maximos": 8}
    path = make(tmp_path, treino={"epocas": 12}, dados={"fracao_validacao": 0.2}, amostras=samples)
    assert run(path) == 0
    folder = tmp_path / "saida" / "lora"
    rows = events(folder)
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    lines = (folder / "metricas.jsonl").read_text(encoding="utf-8").splitlines()
    validations = [json.loads(line) for line in lines if "validation_loss" in line]
    assert validations[-1]["validation_loss"] < validations[0]["validation_loss"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(4, 30)[None]
    before = base(ids).logits
    trained = peft.PeftModel.from_pretrained(base, str(folder / "lora-peft"))
    assert (trained(ids).logits - before).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(folder / "lora-peft").chat_template
    page = next((folder / "amostras").glob("*.md")).read_text(encoding="utf-8")
    assert "pergunta número 3?" in page
    assert "**LoRA:**" in page


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = make(tmp_path / "straight", saida={"salvar_cada": 2})
    assert run(straight) == 0
    broken = make(tmp_path / "broken", saida={"salvar_cada": 2})
    folder = tmp_path / "broken" / "saida" / "lora"
    process = start(broken)
    kill_after_step(process, folder, 3)
    assert run(broken, "--retomar") == 0
    expected, got = adapter(tmp_path / "straight"), adapter(tmp_path / "broken")
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_every_format_is_written_and_checked(tmp_path: Path) -> None:
    path = make(tmp_path, saida={"formatos": ["peft", "gguf", "merged"]}, treino={"epocas": 1})
    assert run(path) == 0
    folder = tmp_path / "saida" / "lora"
    assert "ADAPTER ./lora.gguf" in (folder / "Modelfile").read_text()
    ids = torch.arange(4, 30)[None]
    merged = AutoModelForCausalLM.from_pretrained(folder / "lora-merged", dtype=torch.float32)(ids).logits
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    trained = peft.PeftModel.from_pretrained(base, str(folder / "lora-peft"))(ids).logits
    assert (merged - trained).abs().max() < 0.02 * trained.abs().max()


@pytest.mark.parametrize("options", [{"quantizacao_base": "nf4"}, {"streaming_blocos": 1.0, "descarga_ativacoes": "sim"}])
def test_trains_under_memory_techniques(tmp_path: Path, options: dict[str, object]) -> None:
    assert run(make(tmp_path, memoria=options, treino={"epocas": 1})) == 0


@pytest.mark.parametrize("packed", [one.value for one in sharing(BASE.key)])
def test_every_way_to_pack_a_base_is_planned_trained_and_resumed(
    tmp_path: Path, packed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that its technique gives it."""
    path = make(tmp_path, memoria={"quantizacao_base": packed}, treino={"epocas": 1})
    assert main(["plano", "--config", str(path), "--vram", "4"]) == 0
    assert f"quantizacao_base: {packed}" in capsys.readouterr().out
    assert run(path) == 0
    first = json.loads((tmp_path / "saida" / "lora" / "plano.json").read_text(encoding="utf-8"))
    assert first["plan"]["memory.base_quantization"] == packed
    assert run(path, "--retomar", "treino.epocas=2") == 0
    assert len(events(tmp_path / "saida" / "lora", "resumed")) == 1


def test_image_formats_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make(tmp_path, saida={"formatos": ["kohya"]})) == 2
    assert "kohya não é um formato de" in capsys.readouterr().err


def test_goes_on_from_a_peft_folder(tmp_path: Path) -> None:
    path = make(tmp_path, treino={"epocas": 1})
    assert run(path) == 0
    first = adapter(tmp_path)
    again = ["modelo.lora_inicial=" + str(tmp_path / "saida" / "lora" / "lora-peft"), "saida.nome=segundo"]
    assert run(path, *again, "treino.taxa_aprendizado=1e-12") == 0
    second = load_file(tmp_path / "saida" / "segundo" / "segundo-peft" / "adapter_model.safetensors")
    assert max((first[key] - second[key]).abs().max() for key in first) < 1e-6
    assert run(path, *again[:1], "saida.nome=terceiro", "modelo.classificacao_lora=2") == 2


def test_a_gguf_base_stays_packed(tmp_path: Path) -> None:
    path = make(tmp_path, treino={"epocas": 1})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    write_model(tmp_path / "base.gguf", model, "llama", "Q8_0")
    assert run(path, f"modelo.modelo_base={tmp_path / 'base.gguf'}", f"modelo.tokenizador={tmp_path / 'base'}") == 0
    rows = (tmp_path / "saida" / "lora" / "registro.log").read_text(encoding="utf-8")
    assert "q8_0" in rows


def test_a_merged_model_of_a_gguf_base_is_a_base_again(tmp_path: Path) -> None:
    """On the way, where no format but the whole model was asked for, a PEFT folder is kept."""
    path = make(tmp_path, treino={"epocas": 1}, saida={"formatos": ["merged"], "salvar_cada": 1})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    write_model(tmp_path / "base.gguf", model, "llama", "F32")
    gguf = [f"modelo.modelo_base={tmp_path / 'base.gguf'}", f"modelo.tokenizador={tmp_path / 'base'}"]
    assert run(path, *gguf) == 0
    folder = tmp_path / "saida" / "lora"
    ids = torch.arange(4, 30)[None]
    merged = AutoModelForCausalLM.from_pretrained(folder / "lora-merged", dtype=torch.float32)(ids).logits
    assert (merged - model(ids).logits).abs().max() > 0.1
    assert peft.PeftModel.from_pretrained(model, str(next(folder.glob("*-passo*-peft"))))
    assert events(folder, "done")[0]["files"] == ["lora-merged"]
    assert run(path, f"modelo.modelo_base={folder / 'lora-merged'}", "saida.nome=outro") == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"saida": {"formatos": ["peft", "gguf"]}, "modelo": {"dora": True}}, "não carrega DoRA"),
        ({"amostras": {"medida": "demo"}}, "a medida demo olha imagens"),
        ({"modelo": {"treinar_codificador_texto": True}}, "não tem codificador de texto"),
        ({"modelo": {"modelo_base": "pequeno"}}, "o tokenizador escreve o token"),
    ],
)
def test_what_would_fail_later_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict[str, dict[str, object]], message: str
) -> None:
    path = make(tmp_path, **sections)
    write_base(tmp_path / "pequeno", vocab_size=200)
    assert run(path) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "saida" / "lora" / "metricas.jsonl").exists()


def test_an_empty_prompt_is_answered(tmp_path: Path) -> None:
    options = {"prompts": ["", "oi"], "tokens_maximos": 2}
    path = make(tmp_path, treino={"epocas": 1}, dados={"formato_conversa": "nenhum"}, amostras=options)
    assert run(path) == 0
    folder = tmp_path / "saida" / "lora"
    assert events(folder, "preview")
    assert not events(folder, "preview_failed")


def test_options_without_effect_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path, dados={"espelhar": True}, treino={"epocas": 1, "gama_min_snr": 5})
    shorter = json.loads((tmp_path / "base" / "config.json").read_text()) | {"max_position_embeddings": 16}
    (tmp_path / "base" / "config.json").write_text(json.dumps(shorter))
    assert run(path) == 0
    told = capsys.readouterr()
    assert "sem efeito aqui: dados.espelhar, treino.gama_min_snr" in told.out + told.err
    assert "use dados.comprimento_maximo: 16" in told.out + told.err
