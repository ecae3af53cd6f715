"""Where a family's modules lie in files that keep some matrices fused, as the original does (kohya's LoRA files)."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """A module's place in the file: name, and of a fused matrix which part it is and the rows (outputs) of each.

    `swapped`: the two halves of its rows are exchanged there (scale and shift of SD3's last modulation).
    """

    name: str
    index: int = 0
    rows: tuple[int, ...] = ()
    swapped: bool = False


Slots = Callable[[str], Slot | None]
"""Module path -> its place; None for what the layout cannot carry."""


def flat(name: str) -> str:
    """A layer's dotted name, without its part's, as these files have it."""
    return f"lora_unet_{name.replace('.', '_')}"
