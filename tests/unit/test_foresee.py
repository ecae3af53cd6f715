"""Asking what a run needs: answers are kept, cannot go stale, and `plano` shows them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.original_checkpoint import write_folder, write_single_file
from PIL import Image

from lora_trainer import cli
from lora_trainer.commands._amount import amount_of
from lora_trainer.commands.plano import plan
from lora_trainer.config.loading import Loaded, load
from lora_trainer.files.sources import open_source
from lora_trainer.machine.allowance import base_allowance
from lora_trainer.machine.ram import Ram
from lora_trainer.planner import foresee as foreseeing
from lora_trainer.planner import solve
from lora_trainer.planner.ask import MAPPED_MASTER, ask, with_mapped_master
from lora_trainer.planner.caching import Encoding
from lora_trainer.planner.foresee import Foresight, Question, known_answer
from lora_trainer.planner.picker import Choice
from lora_trainer.planner.plan import STREAMING
from lora_trainer.planner.presets import card_of
from lora_trainer.planner.solve import foresee

GIB = 2**30
MIB = 2**20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foresee") / "base.safetensors"
    write_single_file(path, "sd1")
    return path


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "fotos" / "10_gato"
    folder.mkdir(parents=True)
    for index in range(3):
        Image.new("RGB", (64, 64), (index, 0, 0)).save(folder / f"{index}.png")
    text = (
        f"modelo: {{modelo_base: {base}}}\ndados: {{diretorio_dados: fotos, resolucao: 256}}\n"
        "treino: {epocas: 2, tamanho_lote: 2, passos_acumulacao_gradiente: 4}\nsistema: {dispositivo: cpu}\n"
    )
    (tmp_path / "meu.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "meu.yaml"


def question(config: Path, *settings: str, **changes: Any) -> Question:
    loaded = load(config, settings)
    source = open_source(str(loaded.config.model.base_model))
    fields = {
        "precision": "bf16", "batch_size": 1, "resolution": (256, 256), "available": GIB,
        "written": frozenset(loaded.written), **changes,
    }  # fmt: skip
    return Question(loaded.config, replace(source, planning=True), **fields)


def choice(gib: float) -> Choice:
    return replace(card_of("4gb"), budget=int(gib * GIB), allowance=base_allowance(None, "Linux"))


def asked(loaded: Loaded, gib: float, **options: Any) -> Foresight:
    source = open_source(str(loaded.config.model.base_model))
    worst = (loaded.config.training.batch_size, loaded.config.data.resolution)
    return ask(loaded, choice(gib), source, "bf16", worst=worst, **options)


# -- what is kept


def test_an_answer_comes_back_whole(config: Path, tmp_path: Path) -> None:
    asking = question(config)
    assert known_answer(asking, tmp_path) is None
    found = foresee(asking, tmp_path)
    assert known_answer(asking, tmp_path) == found
    assert list(found.phases) == ["text_cache", "latent_cache", "load", "forward", "backward", "optimizer"]
    assert found.fits
    assert found.peak == max(phase.total for phase in found.phases.values())
    assert isinstance(Encoding.from_json(found.encoding), Encoding)
    assert min(found.cache_bytes) > 0


def test_a_damaged_answer_counts_as_none(config: Path, tmp_path: Path) -> None:
    asking = question(config)
    foresee(asking, tmp_path)
    path = tmp_path / f"{asking.key()}.json"
    for content in ("{", "[]", "{}", path.read_text(encoding="utf-8").replace('"flops"', '"flop"')):
        path.write_text(content, encoding="utf-8")
        assert known_answer(asking, tmp_path) is None


def test_whatever_matters_is_in_the_key(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = question(config).key()
    others = [
        question(config, "modelo.classificacao_lora=32"), question(config, "treino.otimizador=adafactor"),
        question(config, "memoria.streaming_blocos=0.5"), question(config, batch_size=2),
        question(config, resolution=(320, 256)), question(config, available=GIB - 1), question(config, precision="fp16"),
        question(config, "amostras.prompts=[x]"), question(config, written=frozenset()), question(config, preset_first=True),
    ]  # fmt: skip
    assert len({plain, *(other.key() for other in others)}) == len(others) + 1
    assert question(config).key() == plain
    monkeypatch.setattr(foreseeing, "_code", lambda: "another version")
    assert question(config).key() != plain


def test_the_bases_shapes_are_in_the_key_and_its_place_is_not(config: Path, tmp_path: Path, base: Path) -> None:
    moved = tmp_path / "outra.safetensors"
    moved.write_bytes(base.read_bytes())
    assert question(config, f"modelo.modelo_base={moved}").key() == question(config).key()
    write_single_file(moved, "sd2")
    assert question(config, f"modelo.modelo_base={moved}").key() != question(config).key()
    write_folder(tmp_path / "pasta", "sd1")
    folder = question(config, f"modelo.modelo_base={tmp_path / 'pasta'}").key()
    unet = tmp_path / "pasta" / "unet" / "config.json"
    unet.write_text(unet.read_text(encoding="utf-8").replace('"in_channels": 4', '"in_channels": 5'), encoding="utf-8")
    assert question(config, f"modelo.modelo_base={tmp_path / 'pasta'}").key() != folder


def test_another_card_needs_no_second_simulation(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(load(config), 8)
    monkeypatch.setattr(solve, "keep_json", lambda *_: pytest.fail("simulated again"))
    second = asked(load(config, ["memoria.vram=6"]), 6)
    assert (second.values, second.phases) == (first.values, first.phases)


def test_a_cache_that_cannot_be_written_stops_nobody(config: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert asked(load(config), 8).fits


# -- what depends on the moment


def test_a_mapped_master_where_ram_is_short(config: Path) -> None:
    loaded = load(config, ["memoria.streaming_blocos=1.0", "treino.checkpoint_gradiente=sim"])
    roomy, short = Ram(16 * GIB, 8 * GIB), Ram(16 * GIB, MIB)
    found = asked(loaded, 8, ram=roomy)
    assert MAPPED_MASTER not in found.values
    assert asked(loaded, 8, ram=short).values[MAPPED_MASTER] == "yes"
    for own in ("yes", "no"):
        memory = loaded.config.memory.model_copy(update={"mapped_master": own})
        assert with_mapped_master(found, memory, short) is found
    resident = replace(found, values={**found.values, STREAMING: "no"})
    assert with_mapped_master(resident, loaded.config.memory, short) is resident


def test_a_preset_by_name_comes_first(config: Path) -> None:
    """The shipped ones leave memory to the plan; one that does not is followed."""
    loaded = load(config, ["memoria.preset=8gb"])
    streamed = loaded.config.memory.model_copy(update={"block_streaming": 0.5})
    loaded = replace(loaded, config=loaded.config.model_copy(update={"memory": streamed}))
    loaded = replace(loaded, config=loaded.config.model_copy(update={
        "training": loaded.config.training.model_copy(update={"gradient_checkpointing": "yes"})}))  # fmt: skip
    assert asked(loaded, 8).values[STREAMING] == 0.5
    automatic = replace(loaded, written=loaded.written - {("memory", "preset")})
    assert asked(automatic, 8).values[STREAMING] == "no"


# -- plano


def test_steps_and_disk_are_counted(config: Path) -> None:
    amount = amount_of(load(config).config)
    assert amount is not None
    assert (amount.images, amount.draws) == (3, 30)
    assert amount.steps == 2 * 4  # 15 batches of 2, 4 a step
    assert amount_of(load(config, ["treino.passos_maximos=5"]).config) == replace(amount, steps=5)
    assert amount_of(load(config, ["dados.repeticoes=1"]).config) == replace(amount, draws=3, steps=2)
    assert amount_of(load(None, ["modelo.familia=sdxl"], required=()).config) is None


def test_plano_in_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plano", "--config", str(config), "--vram", "6", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    promised = {"fits", "peak_gib", "allowance_gib", "available_gib", "preset", "seconds_per_step", "plan", "phases"}
    assert promised <= set(answer)
    assert (answer["fits"], answer["preset"], answer["available_gib"], answer["steps"]) == (True, "6gb", 6.0, 8)
    assert answer["seconds"] == pytest.approx(8 * answer["seconds_per_step"], abs=0.1)
    assert answer["peak_gib"] + answer["allowance_gib"] < 6
    assert 0 < answer["disk_gib"] < 1
    assert [rung["micro_batch"] for rung in answer["below"]][:1] == [1]
    load(None, [f"{key}={value}" for key, value in answer["plan"].items()], required=())  # valid settings


def test_plano_for_people(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plano", "--config", str(config), "--vram", "6"]) == 0
    said = capsys.readouterr().out
    for part in ("cache das legendas", "passo de volta", "de 6.00 GiB: cabe", "8 passos (3 imagens)", "RAM ao lado",
                 "disco: cerca de", "se faltar memória no meio do treino", "1 exemplo(s) por vez"):  # fmt: skip
        assert part in said
    assert cli.main(["plan", "--config", str(config), "--vram", "6", "--lang", "en"]) == 0
    said = capsys.readouterr().out
    assert "if memory runs out in mid-run" in said
    assert "images)" in said


def test_what_cannot_fit_ends_with_3_and_amounts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["memoria.streaming_blocos=nao", "treino.checkpoint_gradiente=nao", "memoria.quantizacao_base=nao",
                "memoria.descarga_ativacoes=nao"]  # fmt: skip
    assert cli.main(["plano", "--config", str(config), "--vram", "0.6", "dados.resolucao=1024", *settings]) == 3
    said = capsys.readouterr().err
    assert "faltou memória" in said
    assert "treino.tamanho_lote=1" in said
    assert said.count("economiza") >= 3


def test_without_a_base_the_shipped_architecture_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plano"]) == 2
    assert "modelo.familia=sdxl" in capsys.readouterr().err


def test_without_a_budget_nothing_is_saved(config: Path) -> None:
    planned = plan(load(config, ["memoria.preset=nenhum"]))
    assert set(planned.found.values.values()) == {"no"}
    assert planned.found.below == ()
