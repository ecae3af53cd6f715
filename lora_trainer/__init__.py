"""Trains LoRA adapters on the card you have. Start reading at run.py (order of phases) and loop.py (one step)."""

__version__ = "0.1.0"
