"""A pretended CUDA card on a CPU-only PyTorch: `import emucuda` before torch, or `python -m emucuda script.py args`.

See ../README.md for what it pretends, what it reports, and the environment variables that describe the card.
"""

import contextlib
import sys

assert "torch" not in sys.modules, "emucuda must be imported before torch: CUDA's hooks are looked up once"

from . import card  # noqa: E402

card.load()

with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401  (before CUDA seems there: it then takes its CPU library)

from . import nvml, torch_cuda  # noqa: E402
from .card import clear, count, counts, forbid, lag, live, no_kernels, oom_after, reports, set_card  # noqa: E402
from .memory import as_trace  # noqa: E402

torch_cuda.install()
nvml.install()
card.tell_at_exit()

__all__ = [
    "as_trace",
    "clear",
    "count",
    "counts",
    "forbid",
    "lag",
    "live",
    "no_kernels",
    "oom_after",
    "reports",
    "set_card",
]
