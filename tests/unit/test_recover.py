"""Which rung comes next, what counts as out of memory, what is let go after it, and the plan kept in the run folder."""

import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer import loop
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.machine.allowance import Allowance
from lora_trainer.machine.card import Card
from lora_trainer.machine.hardware import Precision
from lora_trainer.machine.ram import Ram
from lora_trainer.planner.ladder import MICRO_BATCH, Rung, next_rung
from lora_trainer.planner.options import CHECKPOINTING, OFFLOAD, OPTIMIZER_OFFLOAD, STREAMING
from lora_trainer.run.run import Run
from lora_trainer.run.setup import Setup
from lora_trainer.runtime.kept import read_plan, write_plan
from lora_trainer.runtime.recover import Shortage, attempt, free_memory, is_out_of_memory
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.mixed_precision import MixedPrecision
from lora_trainer.units import GIB

PLAIN = {CHECKPOINTING: "no", OFFLOAD: "no", STREAMING: "no"}
CPU = torch.device("cpu")


def ladder(rung: Rung, fixed: frozenset = frozenset(), phase: str = "train") -> list[Rung]:
    found = []
    while (lower := next_rung(rung, fixed, phase)) is not None:
        found.append(rung := lower)
    return found


def test_rungs_of_training():
    """The micro-batch first, then recomputation, activations, and more and more streamed blocks."""
    keys = (CHECKPOINTING, OFFLOAD, STREAMING)
    told = [(rung.micro_batch, *(rung.values[key] for key in keys)) for rung in ladder(Rung(PLAIN, 5))]
    assert told == [
        (3, "no", "no", "no"),
        (2, "no", "no", "no"),
        (1, "no", "no", "no"),
        (1, "yes", "no", "no"),
        (1, "yes", "yes", "no"),
        *((1, "yes", "yes", share) for share in (0.25, 0.5, 0.75, 1.0)),
    ]


@pytest.mark.parametrize("phase", ["load", "optimizer", "save", "preview"])
def test_where_nothing_is_learned_only_weights_can_go(phase):
    rungs = ladder(Rung(PLAIN, 4), phase=phase)
    assert [rung.values[STREAMING] for rung in rungs] == [0.25, 0.5, 0.75, 1.0]
    assert {rung.micro_batch for rung in rungs} == {4}
    assert {rung.values[CHECKPOINTING] for rung in rungs} == {"yes"}  # streaming needs it


def test_validation_splits_but_recomputes_nothing():
    first, second, third = ladder(Rung(PLAIN, 4), phase="validation")[:3]
    assert (first.micro_batch, second.micro_batch) == (2, 1)
    assert third.values[STREAMING] == 0.25


def test_moments_leave_last_where_they_can():
    rungs = ladder(Rung({**PLAIN, OPTIMIZER_OFFLOAD: "no"}, 1))
    assert [rung.values[OPTIMIZER_OFFLOAD] for rung in rungs] == ["no"] * 6 + ["yes"]
    assert next_rung(rungs[-1]) is None
    alone = ladder(Rung({**PLAIN, OPTIMIZER_OFFLOAD: "no"}, 1), frozenset({CHECKPOINTING}))
    assert [rung.values for rung in alone] == [{**PLAIN, OPTIMIZER_OFFLOAD: "yes"}]
    fixed = frozenset({OPTIMIZER_OFFLOAD})
    assert ladder(Rung({**PLAIN, OPTIMIZER_OFFLOAD: "no"}, 1), fixed)[-1].values[OPTIMIZER_OFFLOAD] == "no"


def test_what_the_user_fixed_stays():
    assert ladder(Rung(PLAIN, 1), frozenset({CHECKPOINTING})) == []  # what is below needs it
    assert ladder(Rung(PLAIN, 4), frozenset({CHECKPOINTING, MICRO_BATCH})) == []
    values = {**PLAIN, CHECKPOINTING: "yes"}
    assert {rung.values[STREAMING] for rung in ladder(Rung(values, 1), frozenset({STREAMING}))} == {"no"}
    assert {rung.values[OFFLOAD] for rung in ladder(Rung(values, 1), frozenset({OFFLOAD}))} == {"no"}
    assert [rung.values[STREAMING] for rung in ladder(Rung({**values, STREAMING: 0.6, OFFLOAD: "yes"}, 1))] == [0.75, 1.0]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: not enough memory: you tried to allocate"),
    ],
)
def test_out_of_memory_in_its_disguises(error):
    def fails() -> None:
        raise error

    assert is_out_of_memory(error)
    found = attempt(fails)
    assert isinstance(found, Shortage)
    assert not found.torn


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_pass(error):
    def fails() -> None:
        raise error

    with pytest.raises(type(error)):
        attempt(fails)


def test_a_bug_in_the_update_is_no_shortage():
    def fails(cause: Exception) -> None:
        try:
            raise cause
        except Exception as error:
            raise loop.TornUpdate(str(error)) from error

    found = attempt(lambda: fails(torch.OutOfMemoryError("no memory")))
    assert isinstance(found, Shortage)
    assert found.torn
    assert attempt(lambda: fails(RuntimeError("CUDA error: out of memory"))) == Shortage("CUDA error: out of memory", True)
    with pytest.raises(loop.TornUpdate):
        attempt(lambda: fails(RuntimeError("a bug")))


def test_nothing_holds_on_to_what_failed():
    """Frames of the failed pass, the graph that was half walked, and gradients that waited for their turn."""
    seen: list[Any] = []
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    layers[0].weight.register_hook(_runs_out)

    def fails() -> None:
        hidden = torch.ones(64, 64)
        for layer in layers:
            hidden = layer(hidden).relu()
            seen.append(weakref.ref(hidden))
        hidden.sum().backward()

    layers.zero_grad(set_to_none=True)
    gc.collect()
    with MemoryTracker(record=False) as tracker:
        tracker.mark(layers.parameters(), "frozen")
        before = tracker.now
        assert isinstance(attempt(fails), Shortage)
        layers.zero_grad(set_to_none=True)
        free_memory(CPU)
        assert all(reference() is None for reference in seen)
        assert tracker.now == before


def _runs_out(gradient: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_freeing_memory_needs_none():
    with MemoryTracker(limit=0, record=False):
        free_memory(CPU)


# -- the plan in the run folder


def test_plan_is_kept_and_read_back(tmp_path):
    rung = Rung({CHECKPOINTING: "yes", STREAMING: 0.75, OFFLOAD: "no"}, 2)
    write_plan(tmp_path / "plano.json", rung, None, {"encoding": {"vae_tiling": True}, "techniques": ["A"]})
    kept = read_plan(tmp_path / "plano.json")
    assert kept is not None
    assert kept.rung == rung
    assert kept.encoding == {"vae_tiling": True}
    assert kept.peak is None
    assert json.loads((tmp_path / "plano.json").read_text(encoding="utf-8"))["techniques"] == ["A"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"plan": 3}', '{"plan": {}, "micro_batch": "x"}'])
def test_damaged_plan_counts_as_none(tmp_path, text):
    (tmp_path / "plano.json").write_text(text, encoding="utf-8")
    assert read_plan(tmp_path / "plano.json") is None
    assert read_plan(tmp_path / "nowhere.json") is None


# -- the loss scaler


def test_forgetting_gradients_keeps_the_scale_and_the_state_of_growth():
    """A scaler that has unscaled refuses to do so again before its update, which the dropped window never reaches."""
    plan = MemoryPlan((MixedPrecision("fp16", "cpu"),))
    weight = nn.Parameter(torch.ones(4))
    setup = Setup.__new__(Setup)
    setup.plan, setup.optimizer, setup.scaler = plan, torch.optim.SGD([weight], lr=0.1), plan.scaler()
    vars(setup)["target"] = SimpleNamespace(device=CPU)
    for _ in range(3):
        setup.scaler.scale(weight.sum()).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        setup.optimizer.zero_grad()
    kept = setup.scaler.state_dict()
    assert kept["_growth_tracker"] == 3
    setup.scaler.scale(weight.sum()).backward()
    setup.scaler.unscale_(setup.optimizer)
    setup.forget_gradients()
    assert weight.grad is None
    assert setup.scaler.state_dict() == kept
    setup.scaler.scale(weight.sum()).backward()
    setup.scaler.unscale_(setup.optimizer)  # RuntimeError: unscale_() has already been called, if it were remembered
    assert torch.equal(weight.grad, torch.ones(4))


def test_update_whose_end_runs_out_is_torn():
    """The scaler's own update comes after the weights': the window must not be made again on top of them."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)

    class Scaler:
        def step(self, optimizer: torch.optim.Optimizer) -> None:
            optimizer.step()

        def update(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    trainee = SimpleNamespace(scaler=Scaler(), optimizer=torch.optim.SGD([weight], lr=0.1))
    found = attempt(lambda: loop._update(trainee))
    assert isinstance(found, Shortage)
    assert found.torn


# -- warnings before the start (F03, F07)


def shortages(monkeypatch: pytest.MonkeyPatch, device: str, ram: Ram, host: int, peak: int, base: int = 0) -> list[str]:
    monkeypatch.setattr("lora_trainer.run.run.Ram", SimpleNamespace(read=lambda: ram))
    card = Card("RTX", (8, 6), 8 * GIB, int(7.1 * GIB)) if device == "cuda" else None
    choice = SimpleNamespace(card=card, spills=True, allowance=Allowance(GIB // 2, 0, 0.0))
    run = SimpleNamespace(
        device=torch.device(device),
        planning=SimpleNamespace(found=SimpleNamespace(host=host, peak=peak)),
        family=SimpleNamespace(num_bytes=lambda dtype: base),
        precision=Precision(torch.float32, torch.float32, scaler=False),
        choice=choice,
    )
    return Run._shortages(run)  # type: ignore[arg-type]


def test_f07_too_little_ram_is_told_with_numbers(monkeypatch):
    small = Ram(16 * GIB, 10 * GIB, 2 * GIB)
    (told,) = shortages(monkeypatch, "cpu", small, 0, 0, base=24 * GIB)
    assert "24.00 GiB" in told
    assert "10.00 GiB" in told
    assert "encerrar" in told
    assert shortages(monkeypatch, "cpu", replace(small, available=64 * GIB), 0, 0, base=24 * GIB) == []
    (streamed,) = shortages(monkeypatch, "cuda", small, 11 * GIB, GIB)
    assert "11.00 GiB" in streamed
    assert "vai caber" in streamed


def test_f03_a_driver_that_would_spill_is_told_with_both_numbers_and_the_setting(monkeypatch):
    plenty = Ram(64 * GIB, 60 * GIB, 0)
    (told,) = shortages(monkeypatch, "cuda", plenty, 0, int(8.1 * GIB))
    assert "8.60 GiB" in told
    assert "7.10 GiB" in told
    assert "Prefer No Sysmem Fallback" in told
    assert shortages(monkeypatch, "cuda", plenty, 0, 6 * GIB) == []
