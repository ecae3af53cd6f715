"""Adapter files: the layouts other programs load, and proof that they do."""

from .differences import differences
from .lora import Lora, LoraModule
from .read import LoraFile, read_lora, read_tensors

__all__ = ["Lora", "LoraFile", "LoraModule", "differences", "read_lora", "read_tensors"]
