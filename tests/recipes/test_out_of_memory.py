"""The whole command line with memory that runs out: the run ends, and its adapter is that of a run that never met it."""

import gc
import json
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.out_of_memory import MESSAGE, RunsOut, RunsOutIn
from PIL import Image
from recipe import events, make, run
from safetensors.torch import load_file

from lora_trainer import loop
from lora_trainer.commands.plano import plan
from lora_trainer.config.loading import load
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import UserError
from lora_trainer.machine.allowance import allowance_for
from lora_trainer.run.setup import Setup
from lora_trainer.run.training import RETRIES, Training
from lora_trainer.units import GIB

BATCH = {"fracao_validacao": 0.2, "tamanho_lote": 4}
LEARNING = {"passos_acumulacao_gradiente": 1, "checkpoint_gradiente": "auto", "epocas": 2}
CLOSE = 1e-4
Tensors = dict[str, torch.Tensor]


class Place:
    """A folder with base, images, config and a filled cache, in which runs of different names are made."""

    def __init__(self, folder: Path) -> None:
        self.config = make(folder, treino=LEARNING, dados=BATCH)
        self.output = folder / "saida"

    def run(self, name: str, *words: str) -> int:
        return run(self.config, f"saida.nome={name}", *words)

    def trained(self, name: str, *words: str) -> Tensors:
        """The adapter of a run without any shortage; made once."""
        if not self.file(name).exists():
            assert self.run(name, *words) == 0
        return load_file(self.file(name))

    def file(self, name: str) -> Path:
        return self.output / name / f"{name}.safetensors"

    def events(self, name: str, event: str | None = None) -> list[dict[str, Any]]:
        return events(self.output / name, event)

    def losses(self, name: str) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.events(name)}

    def plan(self, name: str) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads((self.output / name / "plano.json").read_text(encoding="utf-8"))
        return plan


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Many runs in a row: no picture of each one's loss, and what the libraries made is not looked through at every release."""
    gc.collect()
    gc.freeze()
    with mock.patch("lora_trainer.run.run.plot_metrics"):
        yield Place(tmp_path_factory.mktemp("oom"))
    gc.unfreeze()


@pytest.fixture(scope="module")
def operators(place: Place) -> int:
    """Of a whole run, caching included; one of its own, whichever test comes first."""
    with RunsOut() as counter:
        assert place.run("operators", f"dados.diretorio_cache={place.output / 'operators'}-cache") == 0
    return counter.count


@pytest.fixture(scope="module")
def peak(place: Place) -> int:
    """Of live bytes, with everything resident."""
    with MemoryTracker(record=False) as tracker:
        place.trained("tracked")
    return tracker.peak


@pytest.fixture(scope="module")
def counts(place: Place) -> Mapping[str, int]:
    """Operators of every phase, training only, without any shortage."""
    place.trained("plain")
    with RunsOutIn().watching() as counter:
        place.trained("counted")
    return counter.counts


def apart(left: Tensors, right: Tensors) -> float:
    assert left.keys() == right.keys()
    return max((left[key] - right[key]).abs().max().item() for key in left)


def run_out(place: Place, name: str, at: dict[str, Collection[int]], *words: str, code: int = 0) -> RunsOutIn:
    """A run that meets all of these shortages, and tells of each."""
    with RunsOutIn(at).watching() as memory:
        assert place.run(name, *words) == code
    assert memory.raised == sum(map(len, at.values())), memory.counts
    assert len(place.events(name, "oom")) == memory.raised
    return memory


# -- no shortage at all: the plan knew


def test_a_batch_that_does_not_fit_is_planned_in_parts(place):
    """The same effective batch, hence the same adapter, with no option but the micro-batch left to the planner."""
    fixed = [
        "memoria.preset=nenhum", "treino.precisao_mista=nao", "treino.checkpoint_gradiente=sim", "memoria.streaming_blocos=nao",
        "memoria.descarga_ativacoes=nao", "memoria.descarga_otimizador=nao", "treino.use_otimizador_8bit=nao",
        "memoria.quantizacao_base=nao",
    ]  # fmt: skip
    sizes = [plan(load(place.config, [*fixed, f"dados.tamanho_lote={size}", "memoria.vram=20"])) for size in (4, 1)]
    whole, one = (planned.choice.allowance.total(planned.found.peak) for planned in sizes)
    assert one < whole
    limit = f"memoria.vram={(whole + 3 * one) / 4 / GIB}"
    assert place.run("in-parts", *fixed, limit) == 0
    assert place.events("in-parts", "oom") == []
    assert place.plan("in-parts")["micro_batch"] < 4
    assert apart(place.trained("in-parts"), place.trained("plain")) < CLOSE


# -- one shortage, anywhere


@pytest.mark.parametrize("share", [0.3, 0.7, 0.97])
def test_one_shortage_anywhere_changes_nothing(place, operators, share):
    """Of all operators of a run, host memory's too: the cache is filled anew."""
    name = f"anywhere-{share}".replace(".", "-")
    with RunsOut([int(operators * share)]) as memory:
        assert place.run(name, f"dados.diretorio_cache={place.output / name}-cache") == 0
    assert memory.raised == 1
    assert apart(place.trained(name), place.trained("plain")) < CLOSE
    assert len(place.events(name, "oom")) == 1
    assert list(place.losses(name)) == [1, 2, 3, 4]


@pytest.mark.parametrize("share", [1.1, 0.4])
def test_cap_on_live_bytes(place, peak, share):
    """No plan is asked for: the run finds its way down the rungs."""
    name = f"cap-{share}".replace(".", "-")
    with MemoryTracker(limit=int(peak * share), record=False) as capped:
        assert place.run(name) == 0
    assert capped.peak <= peak * share
    assert apart(place.trained(name), place.trained("plain")) < CLOSE
    assert bool(place.events(name, "oom")) == (share < 1)


# -- a weight update that stops half-way


def test_torn_first_update_starts_over(place):
    """Nothing was saved yet, and the update's own memory is what is missing: fewer weights on the card."""
    run_out(place, "torn-first", {"optimizer": [9]})
    assert apart(place.trained("torn-first"), place.trained("plain")) < CLOSE
    assert [row["step"] for row in place.events("torn-first", "resumed")] == [0]
    assert place.plan("torn-first")["plan"]["memory.block_streaming"] == 0.25


def test_torn_update_goes_back_to_the_saved_state(place, counts):
    """A step lies between: it is made once more, and the metrics say from where."""
    run_out(place, "torn", {"optimizer": [counts["optimizer"] - 2]}, "saida.salvar_cada=2")
    assert [row["step"] for row in place.events("torn")] == [1, 2, 3, 3, 4]
    assert [row["step"] for row in place.events("torn", "resumed")] == [2]
    assert apart(place.trained("torn"), place.trained("plain")) < CLOSE
    assert place.losses("torn") == pytest.approx(place.losses("plain"), abs=CLOSE)


def test_same_update_torn_again_and_again_ends(place):
    """Steps made once more are no progress: else the run would go round for ever."""
    update, made, tears = loop._update, [], []

    def tears_at_the_third(trainee: loop.Trainee) -> None:
        update(trainee)
        made.append(trainee)
        if len(made) == 3:
            made.clear()
            tears.append(MESSAGE)
            raise loop.TornUpdate(MESSAGE) from torch.OutOfMemoryError(MESSAGE)

    name = "torn-for-ever"
    with mock.patch.object(loop, "_update", tears_at_the_third):
        assert place.run(name, "memoria.streaming_blocos=nao", "memoria.descarga_otimizador=nao") == 3
    assert len(tears) == len(place.events(name, "oom")) == RETRIES + 1
    assert [row["step"] for row in place.events(name)] == [1, 2] * (RETRIES + 1)


IN_BACKWARD = ("memoria.otimizador_no_backward=sim", "treino.norma_maxima_gradiente=0")


@pytest.mark.parametrize(("phase", "starts_over"), [("forward", False), ("backward", True)])
def test_optimizer_in_backward(place, phase, starts_over):
    """A window cannot be split there; one whose backward pass has begun cannot be made again from where it is."""
    expected = place.trained("in-backward", *IN_BACKWARD)
    name = f"in-backward-{phase}"
    run_out(place, name, {phase: [{"forward": 30, "backward": 300}[phase]]}, *IN_BACKWARD)
    assert apart(place.trained(name), expected) < CLOSE
    assert bool(place.events(name, "resumed")) == starts_over
    assert place.plan(name)["micro_batch"] == 4


# -- what is kept over a rebuild


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("schedulefree", ("treino.otimizador=schedulefree_adamw", "treino.agendador=constante")),
        ("prodigy", ("treino.otimizador=prodigy", "treino.taxa_aprendizado=1.0")),
        ("8bit", ("treino.use_otimizador_8bit=sim", "modelo.classificacao_lora=64")),
        ("texts", ("modelo.treinar_codificador_texto=sim", "modelo.dropout_lora=0.3")),
    ],
)
def test_everything_learned_survives(place, name, words):
    """Bit for bit, since no window is split: moments, averages, the weights to train at, dropout."""
    words = (*words, "saida.salvar_cada=2", "treino.checkpoint_gradiente=sim", "dados.tamanho_lote=1", "treino.epocas=1")
    expected, met = place.trained(name, *words), f"{name}-met"
    run_out(place, met, {"load": [900], "forward": [300], "optimizer": [90], "validation": [20], "save": [4]}, *words)
    assert place.plan(met)["plan"]["memory.block_streaming"] == 1.0
    assert apart(place.trained(met), expected) == 0
    assert place.losses(met) == place.losses(name)


def test_stop_during_a_rebuild(place):
    """Ctrl-C while the base is loaded anew: the state is saved after the next step, and the run goes on from it."""
    build = Setup.build

    def stopped(self: Setup, state: Any = None) -> None:
        if self.checked:  # not the first time
            os.kill(os.getpid(), signal.SIGINT)
        build(self, state)

    with mock.patch.object(Setup, "build", stopped):
        run_out(place, "stopped", {"save": [4]}, "saida.salvar_cada=2", code=130)
    assert [row["step"] for row in place.events("stopped")] == [1, 2]
    assert place.run("stopped", "saida.salvar_cada=2", "--retomar") == 0
    assert apart(place.trained("stopped"), place.trained("plain")) == 0


# -- resuming


def test_resumed_run_keeps_the_tightened_plan(place):
    run_out(place, "kept", {"forward": [40, 50]}, "treino.passos_maximos=2")
    before = place.plan("kept")
    assert before["micro_batch"] == 1
    with RunsOutIn().watching() as memory:
        assert place.run("kept", "--retomar") == 0
    assert memory.raised == 0
    assert place.plan("kept")["micro_batch"] == 1
    assert apart(place.trained("kept"), place.trained("plain")) < CLOSE


def test_exit_3_saves_the_state_and_a_roomier_card_goes_on(place, counts):
    """Nothing fits from the middle of the run on; what was learned before is there when it is resumed."""
    words = ("memoria.streaming_blocos=nao", "memoria.descarga_ativacoes=nao")
    with RunsOutIn({"forward": range(counts["forward"] * 3 // 4, 10**6)}).watching():
        assert place.run("full", *words) == 3
    assert list(place.losses("full")) == [1, 2]
    assert place.run("full", "--retomar") == 0
    assert apart(place.trained("full"), place.trained("plain")) < CLOSE
    assert [row["step"] for row in place.events("full")] == [1, 2, 3, 4]


def test_shortage_while_the_saved_state_is_loaded(place):
    assert place.run("restored", "treino.passos_maximos=2") == 0
    load = Setup.load
    failures = iter([torch.OutOfMemoryError(MESSAGE)])

    def fails_once(self: Setup, state: Any) -> None:
        load(self, state)
        for error in failures:
            raise error

    with mock.patch.object(Setup, "load", fails_once):
        assert place.run("restored", "--retomar") == 0
    assert [row["phase"] for row in place.events("restored", "oom")] == ["load"]
    assert apart(place.trained("restored"), place.trained("plain")) < CLOSE


# -- what the user fixed


def test_f01_out_of_memory_at_the_first_step_names_the_keys(place, capfd):
    """Nothing that the user wrote is changed; what is on already is not advised."""
    words = ("treino.checkpoint_gradiente=nao", "dados.tamanho_lote=1", "memoria.streaming_blocos=nao")
    with RunsOutIn({"forward": range(1, 10**6)}).watching():
        assert place.run("f01", *words) == 3
    told = capfd.readouterr().err
    assert "faltou memória em treino, mesmo com tudo o que o plano podia mudar" in told
    assert MESSAGE in told
    advice = [line.strip() for line in told.splitlines() if line.strip()[:2] in ("1.", "2.", "3.", "4.", "5.")]
    assert advice[0].startswith("1. treino.checkpoint_gradiente=sim")
    assert "memoria.streaming_blocos=1.0" in advice[1]
    assert "tamanho_lote" not in "".join(advice)
    assert place.plan("f01")["plan"]["training.gradient_checkpointing"] == "no"


def test_last_rung_is_not_advised_again(place, capfd):
    with RunsOutIn({"forward": range(1, 10**6)}).watching():
        assert place.run("nothing-left") == 3
    told = capfd.readouterr().err
    assert "já ligado: treino.checkpoint_gradiente=sim, memoria.streaming_blocos=1.0" in told
    advice = told.partition("o que mudar")[2]
    assert advice
    assert not any(key in advice for key in ("tamanho_lote", "checkpoint_gradiente", "streaming_blocos", "descarga"))


# -- between two steps


def test_f05_preview_that_runs_out_harms_nothing(place):
    """Samples on and memory short there: the adapter equals that of a run with samples off."""
    words = ("amostras.prompts=[a photo of a cat,red,cat]", "amostras.cada=2", "amostras.passos=1")
    run_out(place, "f05", {"preview": [200, 300, 1000]}, *words)
    assert apart(place.trained("f05"), place.trained("plain")) < 1e-6
    assert {row["phase"] for row in place.events("f05", "oom")} == {"preview"}
    assert len(place.events("f05", "preview")) + len(place.events("f05", "preview_failed")) == 2


def test_probe_finds_the_worst_batch_at_the_first_step(place, tmp_path):
    """The largest bucket comes late; what it needs is known after the first step. Every number stays as it is."""
    for name, size in (("a", (192, 64)), ("b", (192, 64)), ("c", (192, 64)), ("square", (128, 128))):
        Image.new("RGB", size, "teal").save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a photo of a cat", encoding="utf-8")
    words = (f"dados.diretorio_dados={tmp_path}", "dados.resolucao=128", "dados.tamanho_lote=1", "dados.fracao_validacao=0",
             "treino.epocas=1")  # fmt: skip
    probe, peaks = Training._probe_worst, []

    def probe_and_look(self: Training, step: int) -> None:
        tracker.peak = tracker.now
        probe(self, step)
        peaks.append(tracker.peak)

    with mock.patch.object(Training, "_probe_worst", return_value=None):
        without = place.trained("no-probe", *words)
    with mock.patch.object(Training, "_probe_worst", probe_and_look), MemoryTracker(record=False) as tracker:
        with mock.patch.object(Training, "finish", side_effect=UserError("only the steps count")):
            assert place.run("probed", *words) == 2
        assert peaks == [tracker.peak]  # no later step needed more
    assert place.losses("probed") == place.losses("no-probe")
    assert apart(place.trained("probe", *words), without) == 0


@pytest.mark.parametrize("share", [2.0, 0.6])
def test_planned_run_meets_no_shortage(place, peak, share):
    """--vram: everything is foreseen, so that the first plan is the last."""
    allowance = allowance_for(None)
    gibs = allowance.total(int(peak * share)) / GIB
    name = f"vram-{share}".replace(".", "-")
    assert place.run(name, "--vram", f"{gibs:.6f}", "memoria.preset=nenhum") == 0
    assert place.events(name, "oom") == []
    plan = place.plan(name)
    assert max(plan["peak_bytes"].values()) <= allowance.for_tensors(int(gibs * GIB))
    assert max(plan["peak_bytes"].values()) <= plan["peak_gib"] * GIB * 1.03
    if share > 1:  # the other plan changes numbers, within bounds
        assert apart(place.trained(name), place.trained("plain")) < CLOSE


def test_memory_does_not_grow_over_shortages(place):
    """Under the last rung every failure leaves as much behind as the one before: nothing."""
    recover, held = Training._recover, []

    def recover_and_look(self: Training, *rest: Any) -> int:
        step = recover(self, *rest)
        held.append(tracker.now)
        return step

    fixed = ("memoria.streaming_blocos=nao", "memoria.descarga_ativacoes=nao", "dados.tamanho_lote=1")
    at = {"forward": range(300, 5000, 900), "backward": range(700, 5000, 900)}
    looking = mock.patch.object(Training, "_recover", recover_and_look)
    with looking, MemoryTracker(record=False) as tracker, RunsOutIn(at).watching() as memory:
        assert place.run("grows", *fixed) == 0
    assert memory.raised == len(held) > 5
    assert len(set(held[-5:])) == 1
