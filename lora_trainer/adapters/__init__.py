"""Low-rank adapters on a frozen model: which layers get one, how it starts, and what it holds."""

from .adapter import NAME, Adapter
from .base_check import check_base
from .inject import check_initial_file, check_targets, inject
from .targets import find_targets

__all__ = ["NAME", "Adapter", "check_base", "check_initial_file", "check_targets", "find_targets", "inject"]
