"""Stopping in every way there is, and going on: the final file is the one that an uninterrupted run writes (G02, H06)."""

import errno
import signal
import time

import pytest
import torch
from recipe import events, kill_after_step, make, run, start
from safetensors.torch import load_file

from lora_trainer.journal import checkpoint


def final(folder, name="lora"):
    return (folder / "saida" / name / f"{name}.safetensors").read_bytes()


@pytest.fixture
def straight(tmp_path):
    """A folder with a run that was never stopped, kept under saida/reto."""
    config = make(
        tmp_path,
        treino={"epocas": 4},
        modelo={"dropout_lora": 0.1},
        saida={"nome": "lora", "salvar_cada": 2, "precisao": "fp32"},
    )
    assert run(config) == 0
    (tmp_path / "saida" / "lora").rename(tmp_path / "saida" / "reto")
    return config, (tmp_path / "saida" / "reto" / "lora.safetensors").read_bytes()


def test_killed_twice(tmp_path):
    """Long enough (40 steps) that it cannot have ended before it is killed."""
    config = make(tmp_path, treino={"epocas": 20}, modelo={"dropout_lora": 0.1}, saida={"nome": "lora", "salvar_cada": 2})
    folder = tmp_path / "saida" / "lora"
    kill_after_step(start(config), folder, 3)
    kill_after_step(start(config, "--retomar"), folder, 6)
    assert run(config, "--retomar") == 0
    killed = final(tmp_path)
    resumed = [row["step"] for row in events(folder, "resumed")]
    assert len(resumed) == 2
    assert 2 <= resumed[0] < resumed[1] < 40
    assert {row["step"] for row in events(folder)} == set(range(1, 41))
    assert run(config) == 0
    assert final(tmp_path) == killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(tmp_path, number):
    """Long enough (40 steps) that it cannot have ended before the signal comes."""
    config = make(tmp_path, treino={"epocas": 20})
    process = start(config)
    kill_after_step(process, tmp_path / "saida" / "lora", 3, number)
    assert process.returncode == 130
    assert run(config, "--retomar") == 0
    assert len({row["step"] for row in events(tmp_path / "saida" / "lora")}) == 40
    assert run(config, "saida.nome=reto") == 0
    stopped, straight = load_file(tmp_path / "saida/lora/lora.safetensors"), load_file(tmp_path / "saida/reto/reto.safetensors")
    assert all(torch.equal(stopped[key], straight[key]) for key in straight)


def test_unfinished_run_is_not_overwritten(tmp_path, straight, capsys):
    config, expected = straight
    kill_after_step(start(config, "treino.epocas=40"), tmp_path / "saida" / "lora", 3)
    assert run(config) == 2
    assert "--retomar" in capsys.readouterr().err
    assert run(config, "--recomecar") == 0
    assert final(tmp_path) == expected
    assert (tmp_path / "saida" / "lora.antigo-1" / "metricas.jsonl").exists()


def test_stop_in_parts_equals_one_run(tmp_path, straight):
    config, expected = straight
    assert run(config, "treino.passos_maximos=3") == 0
    assert run(config, "--retomar", "treino.passos_maximos=5") == 0
    assert run(config, "--retomar") == 0
    assert final(tmp_path) == expected


def test_finished_run_has_nothing_to_do_and_can_be_extended(tmp_path, capsys):
    config = make(tmp_path, treino={"agendador": "cosseno"})
    assert run(config) == 0
    folder = tmp_path / "saida" / "lora"
    before = final(tmp_path)
    capsys.readouterr()
    assert run(config, "--retomar") == 0
    assert "já terminou (6/6)" in capsys.readouterr().out
    assert final(tmp_path) == before
    assert run(config, "--retomar", "treino.epocas=6") == 0
    steps = events(folder)
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[6]["lr"] > 1e-4
    assert final(tmp_path) != before


@pytest.mark.parametrize("optimizer", ["adamw8bit", "lion8bit", "prodigy", "schedulefree_adamw", "came", "adafactor"])
def test_every_optimizer_resumes_bit_for_bit(tmp_path, optimizer):
    rate = 1.0 if optimizer == "prodigy" else 1e-2
    config = make(
        tmp_path, treino={"otimizador": optimizer, "taxa_aprendizado": rate}, modelo={"classificacao_lora": 64}
    )
    assert run(config, "saida.nome=reto") == 0
    assert run(config, "treino.passos_maximos=3") == 0
    assert run(config, "--retomar") == 0
    with_name = final(tmp_path, "reto")
    assert final(tmp_path)[-100_000:] == with_name[-100_000:]


def test_full_disk_for_the_state_does_not_cost_the_lora(tmp_path, straight, monkeypatch, capsys):
    config, expected = straight
    save_file, calls = checkpoint.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert run(config) == 0
    assert final(tmp_path) == expected
    assert "libere espaço" in capsys.readouterr().out
    states = sorted(path.name for path in (tmp_path / "saida/lora/estado").iterdir() if path.is_dir())
    assert states == ["passo-00000002"]


def test_damaged_state_falls_back_to_the_one_before(tmp_path, straight):
    config, expected = straight
    assert run(config, "treino.passos_maximos=6") == 0
    states = sorted((tmp_path / "saida/lora/estado").glob("passo-*"))
    assert [path.name for path in states] == ["passo-00000004", "passo-00000006"]
    (states[-1] / "optimizer.pt").write_bytes(b"x" * 100)
    assert run(config, "--retomar") == 0
    assert final(tmp_path) == expected


@pytest.mark.parametrize(
    "change", ["modelo.classificacao_lora=8", "modelo.alfa_lora=32", "modelo.rslora=sim", "treino.otimizador=lion8bit",
               "treino.razao_lora_plus=4", "modelo.tipo_predicao=v"]
)  # fmt: skip
def test_another_model_is_refused_on_resume(tmp_path, straight, capsys, change):
    config, _ = straight
    assert run(config, "treino.passos_maximos=2") == 0
    (tmp_path / "saida/lora/estado/concluido.json").unlink()
    log, used = ((tmp_path / "saida/lora" / name).read_bytes() for name in ("registro.log", "config.yaml"))
    capsys.readouterr()
    assert run(config, "--retomar", change) == 2
    told = capsys.readouterr()
    assert change.partition("=")[0] in told.err
    assert "não dá para retomar" in told.err
    assert "True" not in told.err
    assert "parâmetros" not in told.out, "the base was loaded first"
    assert (tmp_path / "saida/lora/registro.log").read_bytes() == log
    assert (tmp_path / "saida/lora/config.yaml").read_bytes() == used


def test_other_changes_are_told_on_resume(tmp_path, straight, capsys):
    config, _ = straight
    assert run(config, "treino.passos_maximos=2") == 0
    capsys.readouterr()
    assert run(config, "--retomar", "treino.tamanho_lote=1", "treino.decaimento_pesos=0.5", "dados.descarte_legendas=0.5") == 0
    out = capsys.readouterr().out
    assert "mudou desde o estado salvo: dados.descarte_legendas: 0.0 → 0.5" in out
    assert "mudou desde o estado salvo: treino.tamanho_lote: 2 → 1" in out
    assert "treino.decaimento_pesos: 0.01 → 0.5" in out


def test_a_start_that_fails_leaves_the_finished_run_in_place(tmp_path, straight):
    config, expected = straight
    assert run(config) == 0
    assert run(config, "modelo.modelo_base=fotos/0.png") == 2
    assert final(tmp_path) == expected
    assert run(config, "modelo.alvos_lora=zz") == 2  # found once the model is loaded
    assert run(config) == 0
    assert final(tmp_path) == expected


@pytest.mark.parametrize("seconds", [0.2, 1.0, 2.0, 3.0, 4.0])
def test_a_signal_at_any_time_ends_with_130_and_nothing_lost(tmp_path, straight, seconds):
    config, expected = straight
    process = start(config)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode in (0, 130, -signal.SIGTERM), out
    assert "Traceback" not in out
    assert run(config, "--retomar") == 0
    assert final(tmp_path) == expected


def test_full_disk_for_an_intermediate_file_or_the_plot_does_not_end_the_run(tmp_path, straight, monkeypatch, capsys):
    from lora_trainer.data import outputs
    from lora_trainer.errors import MachineError
    from lora_trainer.run import run as run_module

    config, expected = straight
    save = outputs.save_adapter

    def full(adapter, family, path, *rest):
        if "-passo" in path.name:
            raise MachineError("o disco está cheio")
        return save(adapter, family, path, *rest)

    def no_plot(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outputs, "save_adapter", full)
    monkeypatch.setattr(run_module, "plot_metrics", no_plot)
    assert run(config) == 0
    assert final(tmp_path) == expected
    assert len(events(tmp_path / "saida/lora", "not_saved")) == 3
    assert "gráfico da perda não foi gravado" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("memoria.streaming_blocos=0.5",), ("memoria.descarga_ativacoes=sim",)])
def test_what_needs_recomputation_brings_it_along_on_a_roomy_card(tmp_path, words):
    """The plan found room for everything, and the kept one says so; the user asks for streaming all the same."""
    config = make(tmp_path, treino={"epocas": 2})
    roomy = ("--vram", "24", "memoria.preset=nenhum")
    assert run(config, "saida.nome=reto") == 0
    assert run(config, *roomy, *words) == 0
    assert run(config, *roomy, "--recomecar", "treino.passos_maximos=2") == 0
    assert run(config, *roomy, *words, "--retomar") == 0
    resumed, straight = load_file(tmp_path / "saida/lora/lora.safetensors"), load_file(tmp_path / "saida/reto/reto.safetensors")
    assert all(torch.allclose(resumed[key], straight[key], atol=1e-4) for key in straight)
