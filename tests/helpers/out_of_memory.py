"""Real torch.OutOfMemoryErrors at chosen operators, wherever the run happens to be then."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RunsOut(TorchDispatchMode):
    """Counts operators that make tensors, and raises instead of running those with the given numbers."""

    def __init__(self, at: Iterable[int] = ()) -> None:
        super().__init__()
        self.at, self.count, self.raised = frozenset(at), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = any(value.alias_info is None for value in func._schema.returns)
        self.count += fresh
        if fresh and self.count in self.at:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total)")
        return func(*args, **(kwargs or {}))
