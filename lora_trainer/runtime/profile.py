"""`memoria.perfil`: where a step's time and memory go, written to `perfil/` in the run folder, once, after warm-up.

Two steps under torch.profiler give `profiler.txt`; the one after gives `memory_summary.txt`, by the CUDA allocator (with
`memory_snapshot.pickle`, for pytorch.org/memory_viz) or, on the CPU, by our tracker. Never both at once, since watching memory
slows down what the other measures. No number of the training changes. Left out: traces of every operator, hundreds of MiB.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..engine.block_streaming import ring_buffers, streaming_report
from ..engine.tracker import CAUSES, MemoryTracker, PhasePeak, mark_resident
from ..errors import t
from ..journal.progress import Terminal
from ..loop import Trainee
from ..planner.advice import cause_title, phase_title
from ..planner.simulate import state_tensors

WARM_UP, TIMED = 2, 2
"""Steps: compilation, first allocations and the optimizer's state come in the first ones."""
ROWS = 40
MIB = 2**20


class Profiler:
    """`step` around every optimizer step of the run; `steps`: how many there will be, where fewer than usual."""

    def __init__(self, folder: Path, device: torch.device, terminal: Terminal, *, steps: int | None = None) -> None:
        self.folder, self.device, self.terminal = folder, device, terminal
        last = WARM_UP + TIMED + 1 if steps is None else min(WARM_UP + TIMED + 1, steps)
        self._memory_at, self._timed = last, range(max(1, last - TIMED), last)
        self._done = 0
        self._profile: Any = None

    @contextmanager
    def step(self, step: int, trainee: Trainee) -> Iterator[None]:
        """`step`: its number, for the files. A step that fails is not counted: the run makes it again."""
        number = self._done + 1
        if number == self._memory_at:
            with self._on_card(step) if self.device.type == "cuda" else self._on_cpu(step, trainee):
                yield
            self.terminal.phase(t(pt=f"perfil gravado em {self.folder}", en=f"profile written to {self.folder}"))
        elif number in self._timed:
            with self._clocked(step, last=number == self._timed[-1]):
                yield
        else:
            yield
        self._done = number

    @contextmanager
    def _clocked(self, step: int, *, last: bool) -> Iterator[None]:
        if self._profile is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.device.type == "cuda" else []
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()
        finished = False
        try:
            with torch.profiler.record_function("optimizer step"):
                yield
            finished = True
        finally:
            if last or not finished:
                profile, self._profile = self._profile, None
                profile.stop()
        if last:
            by = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
            table = profile.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
            self._write("profiler.txt", f"{_title(step)}\n{table}\n")

    @contextmanager
    def _on_card(self, step: int) -> Iterator[None]:
        """Written also when the step runs out of memory: then above all."""
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        try:
            yield
        finally:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory_snapshot.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._write("memory_summary.txt", f"{_title(step)}\n{torch.cuda.memory_summary(self.device)}\n")

    @contextmanager
    def _on_cpu(self, step: int, trainee: Trainee) -> Iterator[None]:
        tracker = StepTracker()
        with tracker:
            mark_resident(trainee.model, tracker)
            tracker.mark(ring_buffers(trainee.model), "frozen")
            tracker.mark(state_tensors(trainee.optimizer), "optimizer")
            with tracker.watching(trainee):
                yield
            peaks = tracker.peaks()
        lines = [_title(step), *_table(peaks), *_streaming(trainee)]
        self._write("memory_summary.txt", "\n".join(lines) + "\n")

    def _write(self, name: str, text: str) -> None:
        """A full disk is told; the run goes on."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            self.terminal.warn(t(pt=f"perfil não gravado: {error}", en=f"profile not written: {error}"))


class StepTracker(MemoryTracker):
    """Finds the phases of a step by itself: whether autograd is walking a graph, and when an optimizer steps."""

    _in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        walking = torch._C._current_graph_task_id() >= 0
        if walking != self._in_backward:
            self._in_backward = walking
            if walking:
                self.mark_saved()
            self.enter_phase("backward" if walking else "forward")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def watching(self, trainee: Trainee) -> Iterator[None]:
        """One optimizer step, however many micro-batches it has."""
        self.enter_phase("forward")
        handle = register_optimizer_step_pre_hook(self._updating(trainee))
        try:
            yield
        finally:
            handle.remove()

    def _updating(self, trainee: Trainee) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            self.mark((p.grad for p in trainee.params if p.grad is not None), "gradients")
            if not self._in_backward:  # one that steps in the backward pass is part of it
                self.enter_phase("optimizer")

        return begin


def _title(step: int) -> str:
    return t(pt=f"passo {step} do otimizador", en=f"optimizer step {step}")


def _table(peaks: dict[str, PhasePeak]) -> list[str]:
    """Phases and causes, in MiB."""
    heads = ["MiB", "total", *map(cause_title, CAUSES), "RAM"]
    rows = [
        [phase_title(name), *(f"{n / MIB:.2f}" for n in (p.total, *(p.causes[c] for c in CAUSES), p.host))]
        for name, p in peaks.items()
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in (heads, *rows)]


def _streaming(trainee: Trainee) -> list[str]:
    report = streaming_report(trainee.model)
    if report is None:
        return []
    host, ring = report.host_bytes / MIB, report.ring_bytes / MIB
    return [
        t(
            pt=f"streaming: {report.blocks} blocos, {host:.1f} MiB na RAM, {ring:.1f} MiB no anel da placa; "
            f"{report.late} de {report.loads} cópias foram esperadas",
            en=f"streaming: {report.blocks} blocks, {host:.1f} MiB in RAM, {ring:.1f} MiB in the card's ring; "
            f"{report.late} of {report.loads} copies were waited for",
        )
    ]
