"""The whole command line with memory that runs out: the run ends, and its adapter is that of a run that never met it."""

from pathlib import Path

import pytest
import torch
from helpers.out_of_memory import RunsOut
from recipe import events, make, run
from safetensors.torch import load_file

from lora_trainer.tracker import MemoryTracker

AUTO = {"passos_acumulacao_gradiente": 1, "checkpoint_gradiente": "auto", "epocas": 4}
DATA = {"fracao_validacao": 0.2, "tamanho_lote": 4}


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "saida" / "lora" / "lora.safetensors")


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[key] - right[key]).abs().max().item() for key in left)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], int]:
    folder = tmp_path_factory.mktemp("plain")
    path = make(folder, treino=AUTO, dados=DATA)
    assert run(path) == 0  # fills the cache, so that the second run's operators are those of training
    with RunsOut() as counter:
        assert run(path) == 0
    return trained(folder), counter.count


@pytest.mark.parametrize("share", [0.3, 0.5, 0.75, 0.95, 0.99])
def test_one_shortage_anywhere_changes_nothing(plain, tmp_path, share):
    expected, operators = plain
    path = make(tmp_path, treino=AUTO, dados=DATA)
    with RunsOut([int(operators * share)]) as memory:
        assert run(path) == 0
    assert memory.raised == 1
    assert largest_difference(trained(tmp_path), expected) < 1e-4
    assert len(events(tmp_path / "saida" / "lora", "oom")) == 1
    assert [row["step"] for row in events(tmp_path / "saida" / "lora")][-1] == 8


@pytest.mark.parametrize("share", [1.1, 0.6, 0.4])
def test_a_cap_on_live_bytes(plain, tmp_path, share):
    """No plan is asked for: the run finds its way down the rungs."""
    expected, _ = plain
    path = make(tmp_path, treino=AUTO | {"checkpoint_gradiente": "auto"}, dados=DATA)
    with MemoryTracker(record=False) as free:
        assert run(path, "treino.passos_maximos=1", "saida.nome=livre") == 0
    with MemoryTracker(limit=int(free.peak * share), record=False) as capped:
        assert run(path) == 0
    assert capped.peak <= free.peak * share
    assert largest_difference(trained(tmp_path), expected) < 1e-4
    assert bool(events(tmp_path / "saida" / "lora", "oom")) == (share < 1)
