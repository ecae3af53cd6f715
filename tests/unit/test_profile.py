"""`memoria.perfil`: the files it writes, that they tell the truth, and that the training goes on as if without it."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny_unets import TinyFamily, make_batch, make_model, trainable

from lora_trainer import loop
from lora_trainer.config.schema import TrainingConfig
from lora_trainer.journal.progress import Terminal
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.runtime.profile import Profiler
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward

CPU = torch.device("cpu")


def run(
    profiler: Profiler | None, *techniques: Technique, steps: int = 5, fail_at: int = 0
) -> tuple[list[float], torch.Tensor]:
    """Losses and adapter; the step numbered `fail_at` raises once, and is made again."""
    family, model, plan = TinyFamily("sd15"), make_model("sd15"), MemoryPlan(techniques)
    settings = TrainingConfig(learning_rate=1e-2, max_grad_norm=0.0)
    plan.wrap(model, family.blocks(model))
    named = trainable(model)
    optimizer = plan.build_optimizer(param_groups(named, settings), settings)
    trainee = loop.Trainee(family, model, list(named.values()), optimizer, plan.scaler(), plan, CPU, 0, 0.0)
    windows = ((step, [make_batch(1, first=step)]) for step in range(steps))
    reports, losses, failed = loop.train(trainee, windows, lambda step: 1.0), [], False
    while len(losses) < steps:
        step = len(losses) + 1
        try:
            with profiler.step(step, trainee) if profiler else nullcontext():
                if step == fail_at and not failed:
                    raise torch.OutOfMemoryError("injected")
                losses.append(next(reports).loss)
        except torch.OutOfMemoryError:
            failed = True
    return losses, torch.cat([p.detach().flatten() for p in named.values()])


SETS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "streamed": (GradientCheckpointing(), BlockStreaming()),
    "in-backward": (GradientCheckpointing(), OptimizerInBackward()),
}


@pytest.fixture(scope="module", params=SETS)
def profiled(request, tmp_path_factory) -> tuple[str, Path, list[float], torch.Tensor]:
    folder = tmp_path_factory.mktemp("run") / "perfil"
    return request.param, folder, *run(Profiler(folder, CPU, Terminal()), *SETS[request.param])


def test_no_number_changes_and_the_files_are_there(profiled):
    name, folder, losses, adapter = profiled
    plain, expected = run(None, *SETS[name])
    assert losses == plain
    assert torch.equal(adapter, expected)
    memory = (folder / "memory_summary.txt").read_text(encoding="utf-8")
    assert memory.startswith("passo 5 do otimizador\n")
    assert ("streaming: " in memory) == (name == "streamed")
    times = (folder / "profiler.txt").read_text(encoding="utf-8")
    assert times.startswith("passo 4 do otimizador\n")
    row = next(line for line in times.splitlines() if line.strip().startswith("optimizer step "))
    assert row.split()[-1] == "2", "two steps were timed"


def rows(path: Path) -> dict[str, list[float]]:
    """Phase -> its figures, in MiB."""
    lines = (path / "memory_summary.txt").read_text(encoding="utf-8").splitlines()[2:]
    split = [re.split(r"\s{2,}", line) for line in lines if not line.startswith("streaming")]
    return {name: [float(cell) for cell in cells] for name, *cells in split}


def test_the_table_holds_what_the_step_used(profiled):
    name, folder, *_ = profiled
    found, model = rows(folder), make_model("sd15")
    assert list(found) == ["passo de ida", "passo de volta", "otimizador"]
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad) / 2**20
    adapter = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
    for total, weights, lora, gradients, moments, activations, temporary, _ in found.values():
        assert total == pytest.approx(weights + lora + gradients + moments + activations + temporary, abs=0.04)
        if name != "streamed":
            assert weights == pytest.approx(frozen, rel=0.2)  # small tensors are rounded up to 512 bytes
        assert moments >= 2 * lora >= adapter
    assert found["passo de volta"][5] > 0.05, "activations"
    gradients, activations = found["otimizador"][3:6:2]
    assert gradients == 0 if name == "in-backward" else gradients >= adapter
    assert activations == 0, "they are gone when the optimizer steps"


def test_savings_are_seen(tmp_path: Path, profiled):
    name, folder, *_ = profiled
    if name == "plain":
        return
    run(Profiler(tmp_path, CPU, Terminal(), steps=1), steps=1)
    plain, saving = rows(tmp_path)["passo de ida"], rows(folder)["passo de ida"]
    assert saving[5] < 0.7 * plain[5]
    assert (saving[1] < 0.5 * plain[1]) == (name == "streamed")


@pytest.mark.parametrize(("steps", "memory_at"), [(1, 1), (2, 2)])
def test_short_runs_are_profiled_too(tmp_path: Path, steps, memory_at):
    run(Profiler(tmp_path, CPU, Terminal(), steps=steps), steps=steps)
    assert (tmp_path / "memory_summary.txt").read_text(encoding="utf-8").startswith(f"passo {memory_at} ")
    assert (tmp_path / "profiler.txt").exists() == (steps > 1)


def test_a_step_that_fails_is_profiled_when_made_again(tmp_path: Path):
    losses, _ = run(Profiler(tmp_path, CPU, Terminal()), fail_at=4)
    assert losses == run(None)[0]
    assert (tmp_path / "memory_summary.txt").read_text(encoding="utf-8").startswith("passo 5 ")
    assert (tmp_path / "profiler.txt").read_text(encoding="utf-8").startswith("passo 4 ")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys):
    blocked = tmp_path / "perfil"
    blocked.write_text("a file")
    losses, _ = run(Profiler(blocked, CPU, Terminal(), steps=1), steps=2)
    assert len(losses) == 2
    assert "perfil não gravado" in capsys.readouterr().out
