"""What a model answers to fixed prompts during training, the base's answers beside the adapter's: pictures or texts.

A preview never harms the run: whatever goes wrong is reported and forgotten. When memory runs out it is made again with
care, as all later ones are then; if that fails too, it is skipped. The base answers once. A measure (the demo's score)
looks at such answers before and after training.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from ..adapters import Adapter
from ..config.names import options, shown
from ..config.schema import Config
from ..errors import ConfigError, language, t
from ..journal.run_folder import RunFolder
from ..runtime.recover import free_memory, is_out_of_memory
from ..techniques import MemoryPlan
from .desk import Desk

Answer = TypeVar("Answer")


class Previews(ABC, Generic[Answer]):
    """`plan` is set when the model is built, and whenever it changes."""

    plan: MemoryPlan
    ending: ClassVar[str]
    """Of a preview's file."""
    care: ClassVar[str]
    """The rung that is taken when memory runs out."""
    measures: ClassVar[dict[str, str]]
    """`amostras.medida` -> module with PROMPTS, how they are answered, and the function `score`."""
    score: ClassVar[str]
    """The measure's function of the answers, and the event's name."""
    score_title: ClassVar[tuple[str, str]]
    """In Portuguese and in English, as is:"""
    others: ClassVar[tuple[str, str]]
    """What measures of other models do."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.settings = desk, desk.config.samples
        self.base: list[Answer] = []
        self.measure: Any = self.find_measure(desk.config)
        self.score_before: float | None = None
        self.careful = False
        """After the first out-of-memory."""
        self._told: set[type[Exception]] = set()

    @classmethod
    def find_measure(cls, config: Config) -> Any:
        """The measure's module, or None. Raises ConfigError for one of other models."""
        name = config.samples.measure
        if name is None or name in cls.measures:
            return importlib.import_module(cls.measures[name]) if name else None
        words = options()["samples", "measure"]
        word, own = (words.word(one, language()) for one in (name, *cls.measures))
        raise ConfigError(
            t(pt=f"a medida {word} {cls.others[0]}", en=f"the measure {word} {cls.others[1]}"),
            t(pt=f"use {own}, ou apague a linha", en=f"use {own}, or delete the line"),
            shown("samples", "measure"),
        )

    @abstractmethod
    def _drawn(self, model: nn.ModuleDict, prompts: Sequence[str], how: Any) -> list[Answer]:
        """The answers, as many at once as may be, or with care."""

    @abstractmethod
    def _usual(self) -> Any:
        """How the user's prompts are answered."""

    @abstractmethod
    def _measured(self) -> Any:
        """How the measure's are."""

    @abstractmethod
    def _write(self, path: Path, step: int, answers: list[Answer]) -> None:
        """The answers beside the base's."""

    def draw(self, model: nn.ModuleDict, adapter: Adapter, step: int, folder: RunFolder) -> None:
        """Save `amostras/passo-N`; a failure is told and training goes on."""
        prompts, metrics = self.settings.prompts, self.desk.metrics
        try:
            if not self.base:
                with adapter.disabled():
                    self.base = self._made(model, prompts, self._usual())
            answers = self._made(model, prompts, self._usual())
            path = folder.samples / f"passo-{step:06d}{self.ending}"
            self._write(path, step, answers)
            metrics.event("preview", step=step, file=path.name)
        except Exception as error:  # whatever it is, training goes on
            text = t(pt=f"amostra do passo {step} falhou: {error}", en=f"preview at step {step} failed: {error}")
            self._tell_once(error, text)
            metrics.event("preview_failed", step=step, problem=f"{type(error).__name__}: {error}")
        finally:
            free_memory(self.desk.device)

    def _tell_once(self, error: Exception, text: str) -> None:
        """What goes wrong at every preview is a warning the first time, and then a line of the log."""
        terminal = self.desk.terminal
        (terminal.note if type(error) in self._told else terminal.warn)(text)
        self._told.add(type(error))

    def _made(self, model: nn.ModuleDict, prompts: Sequence[str], how: Any) -> list[Answer]:
        try:
            return self._answers(model, prompts, how)
        except Exception as error:
            if is_out_of_memory(error):
                self.desk.heard("preview", "skipped")
            raise

    def _answers(self, model: nn.ModuleDict, prompts: Sequence[str], how: Any) -> list[Answer]:
        """From the first out-of-memory on with care."""
        if not self.careful:
            try:
                return self._drawn(model, prompts, how)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self.careful = True
            free_memory(self.desk.device)
            self.desk.heard("preview", self.care)
        return self._drawn(model, prompts, how)

    def measure_before(self, model: nn.ModuleDict, adapter: Adapter) -> None:
        if self.measure:
            with adapter.disabled():
                self.score_before = self._score(model)
            free_memory(self.desk.device)

    def measure_after(self, model: nn.ModuleDict) -> None:
        before = self.score_before
        if before is None or (after := self._score(model)) is None:
            return
        self.desk.metrics.event(self.score, before=before, after=after)
        pt, en = self.score_title
        scores = f"{before:.2f} → {after:.2f}"
        self.desk.terminal.say(t(pt=f"{pt}, antes → depois: {scores}", en=f"{en}, before → after: {scores}"))

    def _score(self, model: nn.ModuleDict) -> float | None:
        """None where there is not enough memory for the answers."""
        try:
            answers = self._made(model, self.measure.PROMPTS, self._measured())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            pt, en = self.score_title
            self._tell_once(error, t(pt=f"{pt}: {error}", en=f"{en}: {error}"))
            return None
        return float(getattr(self.measure, self.score)(answers))
