"""The files a run leaves for its user: written, thinned out, and each proved in the end."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import t
from ..journal.run_folder import keep_last
from ..seam.family import Family
from .desk import RunFacts
from .order import Batches

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Family)
B = TypeVar("B", bound=Batches[Any])


class Outputs(ABC, Generic[F, B]):
    def __init__(self, run: RunFacts, family: F, batches: B) -> None:
        self.run, self.family, self.batches = run, family, batches
        self.config, self.folder = run.loaded.config, run.folder
        self.formats = family.chosen_formats(self.config.output.formats)
        self.written: list[Path] = []

    @abstractmethod
    def _write(self, adapter: Adapter, format_: str, path: Path, step: int) -> None:
        """One file, or folder, of the adapter."""

    @abstractmethod
    def _proved(self, model: nn.ModuleDict, adapter: Adapter, path: Path, step: int) -> str:
        """Raises if the file does not do what the adapter does; else the line that "done" prints."""

    def adapter_formats(self, intermediate: bool) -> tuple[str, ...]:
        """Of those asked for, the ones that hold the adapter alone."""
        return self.formats

    def save(self, adapter: Adapter, step: int, *, intermediate: bool) -> list[Path]:
        """Write every format asked for; intermediate files beyond `manter_ultimos` go."""
        paths = []
        for format_ in self.adapter_formats(intermediate):
            paths.append(self.folder.adapter(format_, step if intermediate else None))
            with host_memory():
                self._write(adapter, format_, paths[-1], step)
            keep_last(self.folder.intermediate(format_), self.config.output.keep_last)
        self.written = paths
        if adapter.is_untrained():
            log.warning(_no_effect(step))
        return paths

    def finish(self, model: nn.ModuleDict, adapter: Adapter, step: int) -> list[str]:
        """Write the final files and prove each; the lines that "done" prints."""
        return [self._proved(model, adapter, path, step) for path in self.save(adapter, step, intermediate=False)]

    def last_good(self) -> str:
        """Where the last usable result is, for a run that diverged."""
        files = [path for format_ in self.adapter_formats(True) for path in self.folder.intermediate(format_)]
        if files:
            return t(pt=f"último arquivo bom: {files[-1]}", en=f"last good file: {files[-1]}")
        states = sorted(self.folder.state.glob("passo-*"))
        if states:
            return t(pt=f"último estado bom: {states[-1]}", en=f"last good state: {states[-1]}")
        return t(pt="nenhum arquivo tinha sido salvo ainda", en="no file had been saved yet")


def _no_effect(step: int) -> str:
    return t(
        pt=f"no passo {step} o LoRA ainda é nulo (não soma nada a nenhum peso): o arquivo não muda nada em nenhum "
        "programa; confira treino.taxa_aprendizado, treino.aquecimento e se a perda é maior que zero",
        en=f"at step {step} the LoRA is still null (it adds nothing to any weight): the file changes nothing in any program; "
        "check training.learning_rate, training.lr_warmup and that the loss is above zero",
    )
