"""The part of a set that is kept from training, chosen by the hash of the content.

So it is the same on every machine, and copies of one picture, or pieces of one text, stay on one side.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from .notes import Notes
from .variants import stable_hash


class Item(Protocol):
    @property
    def content(self) -> str:
        """Equal for copies."""
        ...


T = TypeVar("T", bound=Item)


def hold_out(items: Sequence[T], fraction: float, notes: Notes, two: tuple[str, str]) -> tuple[list[T], list[T]]:
    """(training, validation); both non-empty if the fraction is positive and two items differ, else that is said.

    `two` names two of them, in Portuguese and in English.
    """
    contents = sorted({item.content for item in items}, key=lambda content: stable_hash("split", content))
    if fraction == 0:
        return list(items), []
    if len(contents) < 2:
        notes.warn(
            pt=f"dados.fracao_validacao: {fraction:g}, mas nada ficou fora do treino: é preciso haver ao menos {two[0]}",
            en=f"data.validation_fraction: {fraction:g}, but nothing was held out: at least {two[1]} are needed",
        )
        return list(items), []
    held = set(contents[: max(1, round(fraction * len(contents)))])
    return [i for i in items if i.content not in held], [i for i in items if i.content in held]
