"""What the data phase has to say: notes, warnings and errors, gathered while it works and told together at its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import DataError, t


@dataclass
class Notes:
    """Lines for people, already in the language in force; the texts name files relative to the data folder."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    excluded: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> what was left out because of it, by name or line."""

    def note(self, *, pt: str, en: str) -> None:
        self.notes.append(t(pt=pt, en=en))

    def warn(self, *, pt: str, en: str) -> None:
        self.warnings.append(t(pt=pt, en=en))

    def exclude(self, reason: str, name: str) -> None:
        self.excluded.setdefault(reason, []).append(name)

    def fail(self, problem: str, hint: str = "") -> None:
        self.errors.append(problem)
        if hint and hint not in self.hints:
            self.hints.append(hint)

    def excluded_lines(self, most: int = 5) -> list[str]:
        return [f"{reason}: {len(names)} ({naming(names, most)})" for reason, names in self.excluded.items()]

    def nothing_left(self, *, pt: str, en: str) -> DataError:
        """`pt` and `en` say of what."""
        return DataError(f"{t(pt=pt, en=en)}. {'; '.join(self.excluded_lines())}")

    def raise_errors(self) -> None:
        if self.errors:
            raise DataError("\n".join(self.errors), hint=" ".join(self.hints))


def naming(names: Sequence[str], most: int = 5) -> str:
    """ "a.png, b.png e mais 3" """
    shown = ", ".join(names[:most])
    if len(names) <= most:
        return shown
    return shown + t(pt=f" e mais {len(names) - most}", en=f" and {len(names) - most} more")


def listing(names: Sequence[str], most: int = 200) -> str:
    """One name a line, indented; the cap only keeps a terminal readable."""
    lines = [f"  - {name}" for name in names[:most]]
    if len(names) > most:
        lines.append(t(pt=f"  … e mais {len(names) - most}", en=f"  … and {len(names) - most} more"))
    return "\n".join(lines)


def epochs_line(epochs: int, steps: int) -> str:
    total = epochs * steps
    return t(
        pt=f"{counted(epochs, 'época', 'épocas')} × {steps} = {counted(total, 'passo', 'passos')} do otimizador",
        en=f"{counted(epochs, 'epoch', 'epochs')} × {steps} = {counted(total, 'optimizer step', 'optimizer steps')}",
    )


def counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
