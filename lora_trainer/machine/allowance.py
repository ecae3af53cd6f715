"""Device bytes that no tensor shows: the CUDA context, library workspaces, and what the allocator cannot use.

Starting values are per class of card; what a run really reserved beyond its prediction is remembered per card and
PyTorch version, and corrects the next one. Kept apart from the simulation, which counts tensors only.
"""

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..atomic import keep_json, read_json
from .card import Card

MIB = 2**20
KEPT = 8
"""Measurements remembered per card; the largest counts."""


@dataclass(frozen=True)
class Allowance:
    """Bytes. `context` lies outside PyTorch's allocator; the rest is reserved by it beyond the live tensors."""

    context: int
    workspaces: int
    """cuBLAS, cuBLASLt and the convolution algorithms that cuDNN's heuristics choose."""
    slack: float
    """Reserved but unusable pieces of blocks, as a share of the tensors' peak."""
    correction: int = 0
    """Measured on this card; may be negative, down to the workspaces."""

    def reserved(self, tensors: int) -> int:
        """What the allocator will have reserved when live tensors peak at this."""
        return int(tensors * (1 + self.slack)) + self.workspaces + self.correction

    def total(self, tensors: int) -> int:
        """Of the whole process, as nvidia-smi shows it."""
        return self.reserved(tensors) + self.context

    def for_tensors(self, budget: int) -> int:
        """The peak of live tensors that fits in a budget for the whole process; never negative."""
        return max(0, int((budget - self.context - self.workspaces - self.correction) / (1 + self.slack)))


# Sources. Context: with kernels loaded lazily (the default since CUDA 12.2) 0.25-0.5 GiB, growing with the number of
# SMs; about 0.4 on consumer cards (facts on diffusion trainers, SD 1.5). Windows adds WDDM's own bookkeeping.
# cuBLAS: 2 x 4096 KiB + 8 x 16 KiB = 8,519,680 bytes per stream, 32 MiB from capability 9.0; cuBLASLt 1 MiB, 4 MiB on
# Ampere of 24 GiB and up, 32 MiB from 9.0 (ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp). cuDNN's share is a guess
# for heuristic mode, to be replaced by what runs measure. Slack: 5-7 % of the allocated in published fits for LoRA.
_CLASSES: tuple[tuple[int, Allowance], ...] = (
    (9, Allowance(context=550 * MIB, workspaces=(32 + 32 + 192) * MIB, slack=0.05)),
    (8, Allowance(context=420 * MIB, workspaces=(9 + 4 + 160) * MIB, slack=0.06)),
    (7, Allowance(context=330 * MIB, workspaces=(9 + 1 + 160) * MIB, slack=0.06)),
    (0, Allowance(context=260 * MIB, workspaces=(9 + 1 + 160) * MIB, slack=0.06)),
)
"""Major compute capability, from which on -> allowance."""
WDDM_CONTEXT = 100 * MIB


def base_allowance(card: Card | None, system: str = "") -> Allowance:
    """Of the card's class; a card that is only imitated counts as capability 8."""
    major = card.capability[0] if card else 8
    found = next(allowance for least, allowance in _CLASSES if major >= least)
    if card is not None and (system or platform.system()) == "Windows":
        found = replace(found, context=found.context + WDDM_CONTEXT)
    return found


def allowance_for(card: Card | None, system: str = "") -> Allowance:
    """The class's allowance, corrected by what earlier runs measured on this card."""
    base = base_allowance(card, system)
    if card is None:
        return base
    measured = _read().get(_key(card), [])
    return replace(base, correction=max(max(measured), -base.workspaces)) if measured else base


def remember(card: Card, predicted_reserved: int, measured_reserved: int) -> None:
    """Keep how far off a prediction was: `predicted_reserved` is `base_allowance(card).reserved(tensors)`."""
    table = _read()
    table[_key(card)] = [*table.get(_key(card), []), measured_reserved - predicted_reserved][-KEPT:]
    keep_json(memory_file(), table)


def memory_file() -> Path:
    return user_cache() / "allowances.json"


def user_cache() -> Path:
    """The system's folder for what a program may forget; LORA_TRAINER_CACHE names another."""
    if own := os.environ.get("LORA_TRAINER_CACHE"):
        return Path(own)
    home = Path.home()
    by_system = {
        "Windows": Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")),
        "Darwin": home / "Library" / "Caches",
    }
    return by_system.get(platform.system(), Path(os.environ.get("XDG_CACHE_HOME", home / ".cache"))) / "lora-trainer"


def _key(card: Card) -> str:
    return f"{card.name} | torch {torch.__version__}"


def _read() -> dict[str, list[int]]:
    """What is remembered; a damaged file counts as empty and is replaced by the next measurement."""
    lists = {key: values for key, values in read_json(memory_file()).items() if isinstance(values, list)}
    return {key: [int(value) for value in values if type(value) in (int, float)] for key, values in lists.items()}
