"""Optimizers: where each comes from, what of it the user may set, what sets it apart from the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import Row, table


@dataclass(frozen=True)
class Optimizer(Row):
    module: str
    cls: str
    install: str = "torch"
    """What pip installs it with."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are ours to set."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Arguments we set unless the user does."""
    hidden: tuple[str, ...] = ()
    """Arguments that would break the promise of the name."""
    beyond_options: tuple[str, ...] = ()
    """Arguments whose values the options of that name cannot say: they are given as optimizer_args."""
    eight_bit: str = ""
    """Its 8-bit version: itself where it is one, "" where there is none."""
    unpaged: str = ""
    """The optimizer that differs only in where its state lies: not in memory that the driver moves to the host."""
    fused: bool = False
    """PyTorch's own choice on a card holds temporaries as large as all parameters, unless `fused` is asked for."""
    finds_rate: bool = False
    """Has one estimate of the rate for all parameters, and expects learning_rate 1."""
    averages: bool = False
    """Gives an average of its steps, and needs neither another nor a curve of the rate."""

    @property
    def is_8bit(self) -> bool:
        return self.eight_bit == self.name

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def separable(self) -> bool:
        """Whether parameters can be stepped apart: not with one estimate, or one average of the run, for all of them."""
        return not (self.finds_rate or self.averages)

    @property
    def state(self) -> str:
        """Equal for optimizers that can read each other's state."""
        return self.unpaged or self.name


_EXTRA = "lora-trainer[otimizadores]"


def _bitsandbytes(name: str, cls: str, unpaged: str = "") -> Optimizer:
    hidden = ("optim_bits", "args", "amsgrad", "is_paged")
    return Optimizer(name, "bitsandbytes.optim", cls, "bitsandbytes", hidden=hidden, eight_bit=name, unpaged=unpaged)


OPTIMIZERS = table(
    Optimizer("adamw", "torch.optim", "AdamW", eight_bit="adamw8bit", fused=True),
    _bitsandbytes("adamw8bit", "AdamW8bit"),
    _bitsandbytes("pagedadamw8bit", "PagedAdamW8bit", unpaged="adamw8bit"),
    _bitsandbytes("lion8bit", "Lion8bit"),
    Optimizer(
        "adafactor",
        "transformers.optimization",
        "Adafactor",
        "transformers",
        fixed={"relative_step": False, "warmup_init": False},
        # scale_parameter multiplies the rate by each tensor's size, which for LoRA's zero-initialised B is nearly nothing.
        defaults={"scale_parameter": False},
        beyond_options=("eps",),  # a pair
    ),
    Optimizer("prodigy", "pytorch_optimizer", "Prodigy", _EXTRA, finds_rate=True),
    Optimizer("came", "pytorch_optimizer", "CAME", _EXTRA),
    Optimizer("schedulefree_adamw", "pytorch_optimizer", "ScheduleFreeAdamW", _EXTRA, averages=True),
)

WITH_8BIT = tuple(row.name for row in OPTIMIZERS.values() if row.eight_bit)
