"""State to resume from: `estado/passo-N/`, written beside and renamed, so that it exists whole or not at all.

Each state holds the adapter (float32), the optimizer, the loss scaler and the step's number. Random numbers and the data
order are functions of the seed and the step, so they need no state. Pickles are read with `weights_only=True`.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import UserError, t

KEPT_STATES = 2


@dataclass(frozen=True)
class State:
    step: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    facts: dict[str, Any]
    """What the run must not change when it resumes, and totals to go on with."""


def save_state(folder: Path, state: State) -> Path:
    """Write `folder/passo-N`; older states beyond KEPT_STATES go only after the new one is in place.

    Raises UserError when the disk refuses; the states already there stay as they are.
    """
    final = folder / f"passo-{state.step:08d}"
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file(state.adapter, temporary / "adapter.safetensors")
        torch.save({"optimizer": state.optimizer, "scaler": state.scaler}, temporary / "optimizer.pt")
        (temporary / "state.json").write_text(json.dumps({"step": state.step, "facts": state.facts}), encoding="utf-8")
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk makes torch and safetensors raise
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(
            t(
                pt=f"não consegui salvar o estado em {folder}: {error}",
                en=f"could not save the state in {folder}: {error}",
            ),
            t(
                pt="libere espaço em disco; o último estado bom continua lá",
                en="free some disk space; the last good state is still there",
            ),
        ) from error
    for old in _states(folder)[:-KEPT_STATES]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_state(folder: Path) -> State | None:
    """The newest state that reads whole, on the CPU; None when there is none."""
    for path in reversed(_states(folder)):
        try:
            described = json.loads((path / "state.json").read_text(encoding="utf-8"))
            tensors = load_file(path / "adapter.safetensors")
            rest = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        except Exception:  # a damaged state of any kind: the one before it will do
            continue
        return State(described["step"], tensors, rest["optimizer"], rest["scaler"], described["facts"])
    return None


def latest_step(folder: Path) -> int:
    """Optimizer steps in the newest state, from its name; 0 when there is none."""
    states = _states(folder)
    return int(states[-1].name.rpartition("-")[2]) if states else 0


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("passo-*") if path.is_dir())


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
