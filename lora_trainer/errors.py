"""Errors a user can act on, and the two languages they speak.

`cli.main` prints a UserError without a traceback and exits with its `exit_code`. Anything else is a bug of ours.
User-facing text is written where it is raised, as a pair: `t(pt="…", en="…")`.
"""

import locale
import os
from typing import TypeVar

_language = ""


def set_language(name: str) -> None:
    """Choose "pt" or "en"; "auto" means LORA_TRAINER_LANG, else the locale, else Portuguese."""
    global _language
    _language = name if name in ("pt", "en") else ""


def language() -> str:
    if _language:
        return _language
    for name in ("LORA_TRAINER_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(name, "").lower()
        if value and value not in ("c", "posix") and not value.startswith("c."):
            return "pt" if value.startswith("pt") else "en"
    system = (locale.getlocale()[0] or "").lower()
    return "en" if system and not system.startswith(("pt", "portuguese", "c")) else "pt"


def t(*, pt: str, en: str) -> str:
    """The text in the language in force."""
    return pt if language() == "pt" else en


E = TypeVar("E", bound="UserError")


class UserError(Exception):
    """A problem in the user's config, data or machine: what is wrong, how to mend it, and where."""

    exit_code = 2

    def __init__(self, problem: str, hint: str = "", where: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint, self.where = problem, hint, where

    @classmethod
    def said(cls: "type[E]", *, pt: str, en: str, hint_pt: str = "", hint_en: str = "", where: str = "") -> "E":
        """From both languages' texts."""
        return cls(t(pt=pt, en=en), t(pt=hint_pt, en=hint_en), where)

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        return f"{text}\n  = {t(pt='dica', en='hint')}: {self.hint}" if self.hint else text


class ConfigError(UserError):
    """A wrong key or value."""


class SourceError(UserError):
    """A base model, VAE, tokenizer or adapter file that cannot be used."""


class DataError(UserError):
    """Images, captions or masks that cannot be used."""


class MachineError(UserError):
    """Missing or unusable hardware or library."""


class DoesNotFitError(UserError):
    """Memory could not be made to fit."""

    exit_code = 3


class DivergedError(UserError):
    """Loss, gradient or weights became non-finite."""

    exit_code = 4


class Interrupted(BaseException):
    """The user asked to stop. Not an Exception: code that survives its own failures must not survive this."""

    exit_code = 130

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint

    __str__ = UserError.__str__
    where = ""


class ErrorReport(UserError):
    """Several problems told at once, already formatted."""
