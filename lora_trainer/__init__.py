"""Trains LoRA adapters on the card you have. Start reading at run/run.py (order of phases) and loop.py (one step)."""

import logging

__version__ = "0.1.0"

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # a missing optional kernel, told at import
