"""Real torch.OutOfMemoryErrors at chosen operators: wherever the run happens to be then, or in a chosen phase."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer import loop
from lora_trainer.data import _work
from lora_trainer.data.preview import ImagePreviews
from lora_trainer.engine import tracker
from lora_trainer.run.setup import Setup
from lora_trainer.run.training import Training

MESSAGE = "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total)"
PHASES: tuple[tuple[Any, str, str], ...] = (
    (Setup, "build", "load"),
    (Setup, "load", "load"),
    (Training, "_next_report", "forward"),
    (Training, "_probe_worst", "forward"),
    (loop, "_update", "optimizer"),
    (Training, "validate", "validation"),
    (ImagePreviews, "_drawn", "preview"),
    (Training, "save_state", "save"),
    (Training, "save_intermediate", "save"),
    (Training, "finish", "save"),
)
"""Where each phase is; a backward pass is found by itself, and the caching phase says which one it is."""


class RunsOut(TorchDispatchMode):
    """Counts operators that make tensors, and raises instead of running those with the given numbers."""

    def __init__(self, at: Iterable[int] = ()) -> None:
        super().__init__()
        self.at, self.count, self.raised = frozenset(at), 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call passes through torch.compile's switches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = any(value.alias_info is None for value in func._schema.returns)
        if fresh and self.fails():
            self.raised += 1
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))

    def fails(self) -> bool:
        self.count += 1
        return self.count in self.at


class RunsOutIn(RunsOut):
    """The same by phase: `at` lists numbers of operators within each. Host memory does not run out, only the device's."""

    def __init__(self, at: Mapping[str, Collection[int]] | None = None) -> None:
        super().__init__()
        self.places, self.counts, self.failed = at or {}, Counter[str](), Counter[str]()
        self.phases = ["start"]

    def fails(self) -> bool:
        if tracker._making_host_memory:
            return False
        phase = self.phases[-1]
        if phase == "forward" and torch._C._current_graph_task_id() >= 0:
            phase = "backward"
        self.counts[phase] += 1
        fails = self.counts[phase] in self.places.get(phase, ())
        self.failed[phase] += fails
        return fails

    @contextmanager
    def watching(self) -> Iterator["RunsOutIn"]:
        with ExitStack() as stack:
            for owner, name, phase in PHASES:
                stack.enter_context(mock.patch.object(owner, name, self._within(getattr(owner, name), phase)))
            do = _work.Work.do

            def caching(work: Any, entry: Any) -> Any:
                return self._within(do, work.phase)(work, entry)

            stack.enter_context(mock.patch.object(_work.Work, "do", caching))
            with self:
                yield self

    def _within(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            depth = len(self.phases)
            self.phases.append(phase)
            try:
                return method(*args, **kwargs)
            finally:
                del self.phases[depth:]

        return called
