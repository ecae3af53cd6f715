"""What a run measures of the memory it was planned for: the true reserve above the tensors, and steps that slow down."""

import torch

from ..machine.allowance import base_allowance, remember
from ..machine.cap import SpillWatchdog
from ..planner.picker import Choice


class Measured:
    """`predicted`: bytes of live tensors at the training peak, None where nothing was foreseen."""

    def __init__(self, choice: Choice, predicted: int | None) -> None:
        self.card, self.device, self.predicted = choice.card, choice.device, predicted
        self.probed = False
        self._watchdog = SpillWatchdog()

    def step(self, seconds: float) -> str | None:
        """A warning, once, when steps slow down with the card full."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return self._watchdog.step(seconds, total - free, total)

    def probe_done(self, *, plan_changed: bool) -> None:
        """The worst batch has run: what was reserved beyond the prediction corrects the allowance for this card."""
        self.probed = True
        if self.card is None or self.predicted is None or plan_changed:
            return
        reserved = torch.cuda.max_memory_reserved(self.device)
        remember(self.card, base_allowance(self.card).reserved(self.predicted), reserved)
