"""How files spell an adapter: a table of layouts, and the one packer and the one unpacker that go by it.

In a file a module is a name and, for each of its factors, an ending. A layout says which endings and where the scale is; how a
module's path becomes its name is said in the layout's own file. LoHa's and LoKr's factors are called the same everywhere.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .lora import LoraModule
from .lycoris import LycorisModule

Modules = Mapping[str, LoraModule | LycorisModule]
"""Module path -> what is trained beside it."""
Parts = dict[str, Tensor]
"""Factor (`alpha` too) -> a file's tensor, of one module."""


@dataclass(frozen=True)
class Layout:
    endings: Mapping[str, str]
    """Of a LoRA's factors."""
    scale: Literal["beside", "folded", "apart"]
    """As each module's `alpha`, inside its last factor, or told elsewhere."""
    magnitude: Callable[[int], tuple[int, ...]]
    """Shape of DoRA's magnitude for a weight of so many dimensions."""
    kinds: tuple[str, ...] = ("lora", "loha", "lokr")


_PEFTS = {"down": "lora_A.weight", "up": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
LAYOUTS = {
    "kohya": Layout(
        {"down": "lora_down.weight", "up": "lora_up.weight", "magnitude": "dora_scale"},
        "beside",
        lambda dimensions: (-1, *[1] * (dimensions - 1)),
    ),
    "diffusers": Layout(_PEFTS, "folded", lambda dimensions: (1, -1, 1, 1) if dimensions == 4 else (-1,)),
    "peft": Layout(_PEFTS, "apart", lambda dimensions: (-1,), kinds=("lora",)),
}


def pack(modules: Modules, layout: Layout, spell: Callable[[str], str]) -> dict[str, Tensor]:
    """A file's tensors; `spell` makes a module's name of its path."""
    tensors: dict[str, Tensor] = {}
    for path, module in modules.items():
        name, fitted = spell(path), module.with_scale(1.0) if layout.scale == "folded" else module
        for factor, value in fitted.factors.items():
            shaped = value.reshape(layout.magnitude(fitted.factors["down"].ndim)) if factor == "magnitude" else value
            tensors[f"{name}.{layout.endings.get(factor, factor)}"] = shaped
        if layout.scale == "beside":
            tensors[f"{name}.alpha"] = torch.tensor(module.alpha)
    return tensors


@dataclass(frozen=True)
class Place:
    """Of a file's tensor: what the file calls its module, the path of ours (None: we have none), and which factor it is."""

    called: str
    path: str | None = None
    factor: str | None = None


def gather(
    tensors: Mapping[str, Tensor], place: Callable[[str], Place], needed: Collection[str] = ("down", "up")
) -> tuple[dict[str, Parts], list[str]]:
    """By path the parts of the modules that have all `needed` factors; and what the file calls all else."""
    found: dict[str, Parts] = {}
    strangers = set()
    for key, tensor in tensors.items():
        at = place(key)
        if at.path and at.factor:
            found.setdefault(at.path, {})[at.factor] = tensor
        else:
            strangers.add(at.called)
    complete = {path: parts for path, parts in found.items() if parts.keys() >= set(needed)}
    return complete, sorted(strangers | (found.keys() - complete.keys()))


def lora_module(parts: Mapping[str, Tensor], scale: float | None = None) -> LoraModule:
    """`scale`: where the layout tells it apart; else the module's alpha does, which is its rank where it has none."""
    rank = len(parts["down"])
    if scale is None:
        scale = (float(parts["alpha"]) if "alpha" in parts else float(rank)) / rank
    magnitude = parts["magnitude"].flatten() if "magnitude" in parts else None
    return LoraModule(parts["down"], parts["up"], scale, magnitude)
