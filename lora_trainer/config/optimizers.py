"""What options must know of optimizers; how each is built is optim/optimizers.py's."""

EIGHT_BIT = {"adamw": "adamw8bit", **{name: name for name in ("adamw8bit", "pagedadamw8bit", "lion8bit")}}
"""Optimizer -> its 8-bit version."""
NOT_SEPARABLE = ("prodigy", "schedulefree_adamw")
"""Optimizers with one estimate, or one average of the run, for all parameters."""
