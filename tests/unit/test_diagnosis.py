"""`diagnostico`: what is wrong with a machine, how the last run ended, and what to change (F01, F02, E01)."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lora_trainer import cli, plugins
from lora_trainer.commands.diagnostico import examine, supported
from lora_trainer.config.declared import techniques
from lora_trainer.config.loading import Loaded, load
from lora_trainer.config.names import options
from lora_trainer.config.schema import Config
from lora_trainer.errors import set_language
from lora_trainer.machine.card import Card, Holder
from lora_trainer.machine.hardware import Machine
from lora_trainer.planner.advice import already_on, does_not_fit, explain, phase_title, remedies
from lora_trainer.units import GIB

CARD = Card("NVIDIA GeForce RTX 2060", (7, 5), 6 * GIB, 5 * GIB, holders=(Holder("jogo.exe", GIB // 2),))
WITH_CARD = Machine(cuda_build="12.8", cards=(CARD,), driver="570.1", torch_version="2.13.0+cu128")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "meu.yaml"
    path.write_text("treino: {tamanho_lote: 4}\nsistema: {dispositivo: cpu}\n", encoding="utf-8")
    return path


def loaded_with(*arguments: str) -> Loaded:
    return load(None, arguments, required=())


def checks(machine: Machine, *arguments: str) -> dict[str, Any]:
    return {check.name: check for check in examine(machine, loaded_with(*arguments))}


def conf(**sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


def keys(config: Config, phase: str = "", **options: Any) -> list[str]:
    return [".".join(next(iter(remedy.settings))) for remedy in remedies(config, phase, **options)]


# -- the machine


def test_this_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnostico"]) == 0
    said = capsys.readouterr().out
    for word in ("OK     sistema: ", "PyTorch: ", "precisão: ", "bitsandbytes: ", "RAM: ", "disco: ", "cache: "):
        assert word in said
    assert "FALHA" not in said


def test_the_answer_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--lang", "en", "--vram", "6"]) == 0
    answer = json.loads(capsys.readouterr().out)
    states = {check["name"]: check["state"] for check in answer["checks"]}
    assert {"system", "PyTorch", "choice", "precision", "libraries", "RAM", "disk"} <= set(states)
    assert set(states.values()) <= {"ok", "warning"}
    assert answer["last_run"] is None
    text = next(check["text"] for check in answer["checks"] if check["name"] == "choice")
    assert text.startswith("preset 6gb: ")


def test_f02_a_cpu_build_beside_a_driver_is_a_failure() -> None:
    """Without a driver there is no card to miss: a warning."""
    cpu_build = Machine(cuda_build=None, torch_version="2.13.0+cpu")
    assert checks(cpu_build)["PyTorch"].state == "warning"
    found = checks(replace(cpu_build, driver="570.1"))["PyTorch"]
    assert found.state == "failure"
    assert "pip uninstall -y torch" in found.hint
    hidden = checks(Machine(cuda_build="12.8", driver="570.1", visible="-1"))["PyTorch"]
    assert "CUDA_VISIBLE_DEVICES" in hidden.hint


def test_f02_asking_for_a_card_that_is_not_there_fails(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert cli.main(["diagnostico", "sistema.dispositivo=cuda"]) == 2
    assert "FALHA  escolha: " in capsys.readouterr().out


def test_a_card_with_its_neighbours() -> None:
    found = checks(WITH_CARD, "sistema.dispositivo=cpu")["cuda:0"]
    assert found.state == "ok"
    for part in ("RTX 2060", "capacidade 7.5", "5.00 GiB livres de 6.00 GiB", "jogo.exe 0.50 GiB"):
        assert part in found.text


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 6), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_120"], True),
        ((6, 1), ["sm_75", "sm_80"], False),
        ((9, 0), ["sm_90a"], True),
    ],
)
def test_which_cards_a_build_runs_on(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert supported(capability, built) is runs


def test_f04_broken_8_bit_fails_only_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)  # the import now fails
    machine = Machine(cuda_build=None, torch_version="x")
    assert checks(machine)["bitsandbytes"].state == "warning"
    assert checks(machine, "treino.use_otimizador_8bit=sim")["bitsandbytes"].state == "failure"


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = __import__("collections").namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 9, 1))
    assert checks(Machine(cuda_build=None))["disk"].state == "warning"


# -- what to change


EVERYTHING = conf(
    training={"batch_size": 1, "gradient_checkpointing": "yes", "use_8bit_optimizer": "yes"},
    memory={
        "block_streaming": 1.0, "activation_offload": "yes", "optimizer_offload": "yes", "base_quantization": "nf4",
        "vae_tiling": "yes", "text_streaming": "yes",
    },
    model={"lora_rank": 4},
    data={"resolution": 64},
)  # fmt: skip


def test_f01_the_order_time_first_then_numbers_then_the_result() -> None:
    found = remedies(
        conf(training={"batch_size": 2, "gradient_checkpointing": "no", "mixed_precision": "no"}), "backward"
    )
    assert [remedy.cost for remedy in found] == sorted(
        (remedy.cost for remedy in found), key=["time", "numbers", "result"].index
    )
    assert [next(iter(remedy.settings))[1] for remedy in found] == [
        "batch_size", "gradient_checkpointing", "block_streaming", "activation_offload", "optimizer_offload", "mixed_precision",
        "base_quantization", "use_8bit_optimizer", "lora_rank", "resolution",
    ]  # fmt: skip


def test_f01_a_smaller_batch_keeps_the_effective_one() -> None:
    training = {"batch_size": 3, "gradient_accumulation_steps": 2}
    text = remedies(conf(training=training), "backward")[0].text()
    assert text == "treino.tamanho_lote=1 treino.passos_acumulacao_gradiente=6"


def test_f01_advice_is_ready_for_the_command_line() -> None:
    for remedy in remedies(Config(), "") + remedies(Config(), "preview") + remedies(Config(), "cache"):
        load(None, remedy.text().split(), required=())
    set_language("en")
    for remedy in remedies(conf(training={"batch_size": 2}), ""):
        load(None, [*remedy.text().split(), "sistema.idioma=en"], required=())


def test_f01_nothing_is_advised_twice() -> None:
    assert keys(EVERYTHING) == []
    assert "já está ligado" in explain("backward", {}, EVERYTHING)[-1]
    on = frozenset({("training", "gradient_checkpointing"), ("memory", "block_streaming")})
    assert not {"training.gradient_checkpointing", "memory.block_streaming"} & set(keys(Config(), "backward", on=on))
    assert set(keys(conf(training={"optimizer": "adafactor"}))) & {"training.use_8bit_optimizer"} == set()


def test_advice_suits_the_phase() -> None:
    assert keys(Config(), "latent_cache")[:2] == ["memory.vae_tiling", "memory.text_streaming"]
    assert "training.batch_size" not in keys(conf(training={"batch_size": 8}), "preview")
    assert "samples.resolution" in keys(Config(), "preview")
    assert "data.resolution" in keys(Config(), "backward")


def test_the_explanation_names_phase_causes_what_is_on_and_what_it_saves() -> None:
    causes = {"frozen": 5 * GIB, "activations": 2 * GIB, "adapter": GIB, "optimizer": 1}
    config = conf(training={"gradient_checkpointing": "yes"})
    lines = explain("backward", causes, config, saves={("memory", "block_streaming"): 3 * GIB})
    assert lines[0] == "fase do pico: passo de volta"
    assert lines[1] == "maiores causas: pesos congelados 5.00 GiB, ativações 2.00 GiB, LoRA 1.00 GiB"
    assert lines[2] == "já ligado: treino.checkpoint_gradiente=sim"
    assert "  1. memoria.streaming_blocos=1.0  (só fica mais lento, economiza 3.00 GiB)" in lines
    error = does_not_fit(9 * GIB, 7 * GIB, "backward", lines)
    assert error.exit_code == 3
    assert "9.00 GiB e há 7.00 GiB" in error.problem
    assert "streaming_blocos" in error.hint


def test_what_is_on() -> None:
    assert already_on(Config()) == []
    assert already_on(Config(), frozenset({("memory", "vae_tiling")})) == ["memoria.vae_em_blocos=sim"]
    assert len(already_on(EVERYTHING)) == 8
    assert phase_title("algo_novo") == "algo_novo"


# -- after a run


def run_folder(config: Path, *rows: dict[str, Any], plan: dict[str, Any] | None = None) -> Path:
    folder = config.parent / "saida" / "meu"
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metricas.jsonl").write_text(text + '{"step": 9, "lo', encoding="utf-8")  # a line cut short
    if plan is not None:
        (folder / "plano.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder


def diagnose(config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["diagnostico", "--config", str(config)]) == 0
    said = capsys.readouterr().out
    return said[said.index("última execução") :] if "última execução" in said else ""


def test_no_run_yet(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(config, capsys) == ""


def test_a_run_that_finished_needs_no_advice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(config, {"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.1}, {"event": "done", "step": 2})
    assert diagnose(config, capsys) == "última execução: terminou no passo 2\n"


def test_a_run_that_did_not_fit_is_explained(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "techniques": ["GradientCheckpointing", "MixedPrecision"],
        "phases": {"backward": {"frozen": 4.8, "activations": 2.5}, "latent_cache": {"temporary": 1.0}},
    }
    run_folder(
        config,
        {"step": 3, "loss": 0.1},
        {"event": "oom", "phase": "backward", "step": 4},
        {"event": "stopped", "reason": "DoesNotFitError", "problem": "não coube"},
        plan=plan,
    )
    said = diagnose(config, capsys)
    for part in (
        "parou no passo 3", "não coube", "faltou VRAM 1 vez(es)", "fase do pico: passo de volta",
        "pesos congelados 4.80 GiB, ativações 2.50 GiB", "já ligado: treino.checkpoint_gradiente=sim",
        "1. treino.tamanho_lote=1 treino.passos_acumulacao_gradiente=4", "2. memoria.streaming_blocos=1.0",
    ):  # fmt: skip
        assert part in said
    assert "checkpoint_gradiente=sim  (" not in said


def test_the_plans_amounts_are_told_after_a_failure(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"techniques": ["MixedPrecision"], "saves": {"memory.block_streaming": 2.5, "nonsense": "x"}}
    run_folder(config, {"event": "stopped", "reason": "DoesNotFitError", "problem": "não coube"}, plan=plan)
    assert "memoria.streaming_blocos=1.0  (só fica mais lento, economiza 2.50 GiB)" in diagnose(config, capsys)


def test_every_technique_is_an_option_or_known_to_be_none() -> None:
    found = techniques()
    assert len(found) == len(plugins.available("lora_trainer.techniques")) > 8
    assert {one.__name__ for one in found if not one.options} == {"AttentionSlicing", "MixedPrecision"}
    assert {declared.key for one in found for declared in one.options} <= set(options())


def test_other_ends_get_no_memory_advice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(config, {"step": 3, "loss": 0.1}, {"event": "stopped", "reason": "DivergedError", "problem": "NaN"})
    said = diagnose(config, capsys)
    assert "NaN" in said
    assert "o que mudar" not in said


def test_f07_a_killed_run_says_that_ram_was_short(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier end in the same file is not this start's."""
    run_folder(
        config, {"step": 1, "loss": 0.1}, {"event": "stopped", "reason": "Interrupted"}, {"step": 2, "loss": 0.1}
    )
    said = diagnose(config, capsys)
    assert "foi encerrada no passo 2" in said
    assert "faltou RAM" in said


def test_a_run_in_progress_is_not_called_dead(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(config, {"step": 2, "loss": 0.1})
    owner = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    folder.with_name(".meu.lock").write_text(json.dumps(owner), encoding="utf-8")
    assert "está em andamento no passo 2" in diagnose(config, capsys)


def test_the_last_run_in_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(config, {"event": "stopped", "reason": "DoesNotFitError", "problem": "não coube"}, plan={"phases": 3})
    assert cli.main(["diagnostico", "--config", str(config), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["last_run"]["end"], answer["last_run"]["reason"]) == ("stopped", "DoesNotFitError")
    assert any("tamanho_lote=1" in line for line in answer["advice"])


def test_a_batch_that_cannot_be_split_is_not_advised_to_be() -> None:
    whole = loaded_with("treino.tamanho_lote=8", "treino.norma_maxima_gradiente=0", "memoria.otimizador_no_backward=sim").config
    assert ("training", "batch_size") not in [key for one in remedies(whole, "backward") for key in one.settings]
