"""What the user sees, and the same lines in the run folder: everything shown here can be derived from its files.

`Terminal` writes phases, notices and one bar (rich on a TTY, plain lines elsewhere). `Metrics` appends objects to
metricas.jsonl. `Phases` remembers the peak memory of every phase.
"""

import contextlib
import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..atomic import write_json  # noqa: F401
from ..engine.tracker import MemoryTracker
from ..errors import t

PLAIN_LINE_SECONDS = 15.0


class Terminal:
    """Console output with a copy in registro.log, from `open_log` on; what came before is written there then."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.log: TextIO = io.StringIO()

    def open_log(self, path: Path) -> None:
        early = self.log
        self.log = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115  (lives as long as the run)
        if isinstance(early, io.StringIO):
            self.log.write(early.getvalue())

    def say(self, *texts: str, style: str = "") -> None:
        for text in texts:
            self.console.print(text, style=style, markup=False)
            self.note(text)

    def warn(self, *texts: str) -> None:
        self.say(*(f"{t(pt='aviso', en='warning')}: {text}" for text in texts), style="yellow")

    def phase(self, text: str) -> None:
        self.say(f"• {text}", style="bold")

    def log_handler(self) -> logging.Handler:
        """Warnings that deep code logs become notices here."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warn(record.getMessage())  # type: ignore[method-assign]
        return handler

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        for line in (title, *("  " + "  ".join(row) for row in [columns, *rows])):
            self.note(line)

    def note(self, text: str) -> None:
        """Into registro.log only."""
        with contextlib.suppress(OSError):  # a full disk must not end the run
            self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self.log.flush()

    @contextmanager
    def bar(self, title: str, total: int, start: int = 0) -> Iterator["Bar"]:
        bar = Bar(self, title, total, start)
        with bar.progress or nullcontext():
            yield bar

    @contextmanager
    def steps(self) -> Iterator[Callable[[str, int, int], None]]:
        """A callback (phase, done, total) that shows a bar for each phase it hears of."""
        with ExitStack() as stack:
            bars: dict[str, Bar] = {}

            def heard(phase: str, done: int, total: int) -> None:
                if phase not in bars:
                    bars[phase] = stack.enter_context(self.bar(_phase_title(phase), total))
                bars[phase].advance(done - bars[phase].done)

            yield heard

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.log.close()


def _phase_title(name: str) -> str:
    titles = {
        "check": t(pt="conferindo imagens", en="checking images"),
        "texts": t(pt="codificando legendas", en="encoding captions"),
        "images": t(pt="codificando imagens", en="encoding images"),
    }
    return titles.get(name, name)


class Bar:
    """Progress of one phase; on a pipe, a plain line now and then."""

    def __init__(self, terminal: Terminal, title: str, total: int, start: int) -> None:
        self.terminal, self.title, self.total, self.done = terminal, title, total, start
        self.last_line = time.monotonic()
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        if terminal.console.is_terminal:
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=terminal.console,
            )
            self.task = self.progress.add_task(title, total=total, completed=start, note="")

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        if self.progress and self.task is not None:
            self.progress.update(self.task, completed=self.done, note=note)
        elif self.done >= self.total or time.monotonic() - self.last_line >= PLAIN_LINE_SECONDS:
            self.terminal.say(f"  {self.title} {self.done}/{self.total} {note}".rstrip())
            self.last_line = time.monotonic()


class Metrics:
    """Append-only JSON lines, from `open` on. A line cut by a killed process is removed then."""

    def __init__(self) -> None:
        self.file: TextIO = io.StringIO()

    def open(self, path: Path) -> None:
        _drop_partial_line(path)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (lives as long as the run)

    def write(self, **values: Any) -> None:
        """On a full disk the line is lost and the run goes on."""
        with contextlib.suppress(OSError):
            self.file.write(json.dumps(values, ensure_ascii=False) + "\n")
            self.file.flush()

    def event(self, name: str, **values: Any) -> None:
        self.write(event=name, **values)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """None where there is no file; a line cut by a killed process is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def _drop_partial_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


class Phases:
    """Peak bytes by phase: the allocator's on a CUDA device, a tracker's where the CPU imitates a card, else the process's
    resident memory."""

    def __init__(self, device: torch.device, tracker: MemoryTracker | None = None) -> None:
        self.device, self.tracker = device, tracker
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.tracker is not None:
            self.tracker.peak = self.tracker.now
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), self.current_peak())

    def current_peak(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if self.tracker is not None:
            return self.tracker.peak
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most resident memory this process has held so far, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
