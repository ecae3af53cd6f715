"""What the user picks by name: an optimizer, a curve of the rate, a loss, its weight, how noise levels are drawn.

One row says all there is to know of one choice: its name, its Portuguese words, what it does. The option's words in
config/schema.py are read off the rows. Nothing here imports PyTorch, which reading a config does without: rows work on the
tensors they are given, or name a class or function to be looked up when it is needed.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar


class Row(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def pt(self) -> tuple[str, ...]:
        """Portuguese spellings, the usual one first; none where the name is used in both languages."""
        ...


R = TypeVar("R", bound=Row)


def table(*rows: R) -> dict[str, R]:
    return {row.name: row for row in rows}


def words(rows: Mapping[str, Row]) -> dict[str, str]:
    """Portuguese word -> name."""
    return {word: row.name for row in rows.values() for word in row.pt}


def read(options: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """What a row reads, as the arguments of its function."""
    return {name: getattr(options, name) for name in names}
