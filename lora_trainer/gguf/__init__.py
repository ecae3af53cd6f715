"""Bases in GGUF files: reading them, unpacking their blocks, and what language models call their tensors."""
