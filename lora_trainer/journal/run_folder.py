"""The folder of one run: where everything lies, who holds it, and what is already there.

saida/<name>/  <name>.safetensors  config.yaml  plano.json  metricas.jsonl  registro.log  amostras/  estado/
"""

import glob
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..atomic import read_json
from ..errors import ConfigError, MachineError, t
from .checkpoint import latest_step

ENDINGS = {
    "kohya": "-kohya.safetensors",
    "diffusers": "-diffusers.safetensors",
    "peft": "-peft",
    "gguf": ".gguf",
    "merged": "-merged",
}


@dataclass(frozen=True)
class RunFolder:
    path: Path
    name: str
    usual: str = "kohya"
    """The format whose files have the bare name."""

    @property
    def state(self) -> Path:
        return self.path / "estado"

    @property
    def samples(self) -> Path:
        return self.path / "amostras"

    @property
    def metrics(self) -> Path:
        return self.path / "metricas.jsonl"

    @property
    def plan(self) -> Path:
        return self.path / "plano.json"

    @property
    def facts(self) -> Path:
        """What the run drew or noted when it first started: seed, day."""
        return self.state / "execucao.json"

    @property
    def done(self) -> Path:
        return self.state / "concluido.json"

    @property
    def finished(self) -> bool:
        return self.done.exists()

    @property
    def worth_keeping(self) -> bool:
        """A run that left something: a failed start is no run."""
        return self.finished or latest_step(self.state) > 0 or any(self.path.glob("*.safetensors"))

    def adapter(self, format_: str, step: int | None = None) -> Path:
        middle = "" if step is None else f"-passo{step:06d}"
        return self.path / f"{self.name}{middle}{self._ending(format_)}"

    def intermediate(self, format_: str) -> list[Path]:
        return sorted(self.path.glob(f"{glob.escape(self.name)}-passo??????{self._ending(format_)}"))

    def _ending(self, format_: str) -> str:
        return ".safetensors" if format_ == self.usual else ENDINGS[format_]

    def read_facts(self) -> dict[str, Any]:
        """{} for a folder without them, or damaged ones."""
        return read_json(self.facts)


def check(folder: RunFolder, *, resume: bool, restart: bool) -> None:
    """An unfinished run needs the user's word. Changes nothing, so it may come before anything else is known."""
    if folder.worth_keeping and not (folder.finished or resume or restart):
        raise ConfigError.said(
            pt=f"já existe uma execução não terminada em {folder.path}",
            en=f"there is an unfinished run in {folder.path}",
            hint_pt="continue com --retomar, comece de novo com --recomecar (a antiga é guardada) ou mude saida.nome",
            hint_en="go on with --resume, start over with --restart (the old one is kept) or change output.name",
        )


def claim(folder: RunFolder, *, resume: bool) -> str:
    """Make the folder ready, once the base and the data are known to be good; return a line to say, or "".

    An earlier run is moved aside, never overwritten.
    """
    note = ""
    if not resume:
        if folder.worth_keeping:
            note = _move_aside(folder)
        for leftover in (folder.facts, folder.metrics):
            leftover.unlink(missing_ok=True)
    for path in (folder.path, folder.state, folder.samples):
        path.mkdir(parents=True, exist_ok=True)
    return note


def _move_aside(folder: RunFolder) -> str:
    number = 1
    while (target := folder.path.with_name(f"{folder.path.name}.antigo-{number}")).exists():
        number += 1
    os.replace(folder.path, target)
    return t(pt=f"a execução anterior foi guardada em {target}", en=f"the previous run was moved to {target}")


class Lock:
    """One process at a time in a run folder; a lock left by a dead process is taken over."""

    def __init__(self, folder: RunFolder) -> None:
        self.path = folder.path.with_name(f".{folder.path.name}.lock")

    def __enter__(self) -> "Lock":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                self._take_over_or_refuse()
                continue
            with os.fdopen(descriptor, "w") as file:
                json.dump({"pid": os.getpid(), "started": psutil.Process().create_time()}, file)
            return self

    def owner(self) -> int | None:
        """The process that holds it; None where none does, or it is dead."""
        owner = read_json(self.path)
        try:
            alive = abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1
        except (ValueError, KeyError, TypeError, psutil.NoSuchProcess):
            return None
        return int(owner["pid"]) if alive else None

    def _take_over_or_refuse(self) -> None:
        if (pid := self.owner()) not in (None, os.getpid()):
            raise MachineError.said(
                pt=f"o processo {pid} já está treinando nesta pasta",
                en=f"process {pid} is already training in this folder",
                hint_pt="espere ele terminar ou mude saida.nome",
                hint_en="wait for it to end or change output.name",
            )
        self.path.unlink(missing_ok=True)

    def __exit__(self, *exc: object) -> None:
        self.path.unlink(missing_ok=True)


def keep_last(paths: list[Path], count: int) -> None:
    for path in paths[:-count]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

