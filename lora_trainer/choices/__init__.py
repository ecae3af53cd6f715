"""What the user picks by name: an optimizer, a curve of the rate, a loss, its weight, how noise levels are drawn.

One row says all there is to know of one choice: its name, its Portuguese words, what it does. The option's words in
config/schema.py are read off the rows. Nothing here imports PyTorch, which reading a config does without: rows work on the
tensors they are given, or name a class or function to be looked up when it is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(frozen=True)
class Row:
    name: str
    pt: tuple[str, ...] = field(default=(), kw_only=True)
    """Portuguese words for it, the usual one first; none where the name is used in both languages."""
    reads: tuple[str, ...] = field(default=(), kw_only=True)
    """Options of `training` that its function takes."""

    def arguments(self, options: Any) -> dict[str, Any]:
        """What it reads, by name, from an object with these options."""
        return {name: getattr(options, name) for name in self.reads}


R = TypeVar("R", bound=Row)


def table(*rows: R) -> dict[str, R]:
    return {row.name: row for row in rows}


def words(rows: Mapping[str, Row]) -> dict[str, str]:
    """Portuguese word -> name."""
    return {word: row.name for row in rows.values() for word in row.pt}
