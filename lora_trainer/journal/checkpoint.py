"""State to resume from: `estado/passo-N/`, written beside and renamed, so that it exists whole or not at all.

Each state holds the adapter (float32), the optimizer, the loss scaler and the step's number. Random numbers and the data
order are functions of the seed and the step, so they need no state. Pickles are read with `weights_only=True`.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import UserError

KEPT_STATES = 2
_NAME = re.compile(r"passo-\d{8,}")


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
        described = {"step": state.step, "facts": state.facts, "sha256": _hashes(temporary)}
        (temporary / "state.json").write_text(json.dumps(described), encoding="utf-8")
        _sync(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # what a full disk makes torch and safetensors raise
        raise UserError.said(
            pt=f"não consegui salvar o estado em {folder}: {error}",
            en=f"could not save the state in {folder}: {error}",
            hint_pt="libere espaço em disco; o último estado bom continua lá",
            hint_en="free some disk space; the last good state is still there",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _states(folder)[:-KEPT_STATES]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_state(folder: Path) -> State | None:
    """The newest state that is whole, on the CPU; None when there has never been one.

    Raises UserError when there are states and none can be used: starting over would throw the run away.
    """
    paths = _states(folder)
    for path in reversed(paths):
        if (state := _read(path)) is not None:
            return state
    if paths:
        raise UserError.said(
            pt=f"nenhum dos estados salvos em {folder} está inteiro: {', '.join(path.name for path in paths)}",
            en=f"none of the saved states in {folder} is whole: {', '.join(path.name for path in paths)}",
            hint_pt="comece de novo com --recomecar (a execução antiga é guardada)",
            hint_en="start over with --restart (the old run is kept)",
        )
    return None


def _read(path: Path) -> State | None:
    try:
        described = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if described["sha256"] != _hashes(path):
            return None
        tensors = load_file(path / "adapter.safetensors")
        rest = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
        return State(described["step"], tensors, rest["optimizer"], rest["scaler"], described["facts"])
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # a damaged state of any kind: the one before it will do
        return None


def _hashes(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("adapter.safetensors", "optimizer.pt")
    }


def on_cpu(state: Any) -> Any:
    """A copy of an optimizer's state dict whose tensors lie on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)


def latest_step(folder: Path) -> int:
    """Optimizer steps in the newest state, from its name; 0 when there is none."""
    states = _states(folder)
    return int(states[-1].name.rpartition("-")[2]) if states else 0


def newest_facts(folder: Path) -> dict[str, Any] | None:
    """What the newest state was made with, without loading it; None where there is none that can be read."""
    try:
        facts = json.loads((_states(folder)[-1] / "state.json").read_text(encoding="utf-8"))["facts"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("options"), dict) else None


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("passo-*") if path.is_dir() and _NAME.fullmatch(path.name))


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
