"""How long a step takes, well enough to rank plans: counted FLOPs and copied bytes over what the machine sustains.

A card's peak is worked out from its multiprocessors and clock (FLOPs per clock and multiprocessor by architecture, from
NVIDIA's architecture whitepapers, 16-bit inputs with float32 sums as on GeForce cards); LoRA training sustains under half of it.
A card copies from host memory while it computes, so the slower of the two counts; a CPU does one after the other. Figures
for cards that are only imitated are those of a common card of that size. Left out: memory-bound operations, which all plans
of a model share, and the unpacking of packed weights.
"""

import re
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from .card import Card

SUSTAINED = 0.4
"""Share of the peak that training reaches."""
FLOPS_PER_CLOCK = {6: 256, 7: 512, 8: 512, 9: 4096, 10: 4096, 12: 512}
"""By the capability's first number, per multiprocessor; data-centre parts of a generation have more."""
LINK_BYTES = 11e9
"""Per second, pinned memory over PCIe 3.0 x16 or 4.0 x8."""
TYPICAL = {4: 6e12, 6: 13e12, 8: 22e12, 12: 26e12, 16: 40e12, 24: 70e12, 48: 90e12}
"""Peak FLOP/s of a common card with so many GiB: GTX 1650, RTX 2060, RTX 3060 Ti, RTX 3060, RTX 4060 Ti 16, RTX 3090, …"""


@dataclass(frozen=True)
class Speed:
    """What a machine sustains, per second; `measured` tells it from a guess."""

    flops: float
    link_bytes: float
    source: str
    overlaps: bool = True
    """Copies run beside computing."""

    def seconds(self, flops: int, transferred: int) -> float:
        computing, copying = flops / self.flops, transferred / self.link_bytes
        return max(computing, copying) if self.overlaps else computing + copying


def speed_of(card: Card | None, vram_gib: float | None = None) -> Speed:
    """Of a real card, of a common card with `vram_gib`, or of this CPU (a quarter of a second of multiplying)."""
    if card is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(card.index)
        clock = getattr(properties, "clock_rate", 1_700_000) * 1e3
        per_clock = FLOPS_PER_CLOCK.get(card.capability[0], 512)
        if re.search(r"\b(A100|H100|H200|V100)\b", card.name):
            per_clock = {7: 1024, 8: 2048, 9: 4096}[card.capability[0]]
        peak = properties.multi_processor_count * clock * per_clock
        return Speed(peak * SUSTAINED, LINK_BYTES, card.name)
    if vram_gib is not None:
        nearest = min(TYPICAL, key=lambda size: abs(size - vram_gib))
        return Speed(TYPICAL[nearest] * SUSTAINED, LINK_BYTES, f"{nearest} GB")
    return Speed(_cpu_flops(), 5e9, "CPU", overlaps=False)


def _cpu_flops() -> float:
    size = 512
    timer = Timer("x @ x", globals={"x": torch.ones(size, size)}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.25).median * 0.7


