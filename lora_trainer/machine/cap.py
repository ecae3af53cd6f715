"""Keep the process within its share of the card, and notice when the driver helps in the wrong way.

With drivers after 531.79 Windows moves what does not fit into shared memory: no error, but steps 10 to 50 times slower. A cap
turns that into an OutOfMemoryError, which is handled; the watchdog is for what lies outside PyTorch's allocator.
"""

import torch

from ..errors import t
from ..units import gib
from .card import Card

SLOWDOWN = 5.0
FULL_SHARE = 0.95
SLOW_STEPS = 3
"""In a row, so that one hiccup of the disk says nothing."""


def cap_process(device: torch.device, limit: int) -> float | None:
    """Let PyTorch's allocator reserve at most `limit` bytes; the fraction set, None off CUDA.

    The limit is the allocator's (`Choice.cap`): the CUDA context does not count against it.
    """
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = min(1.0, max(limit / total, 1e-3))
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    return fraction


def spill_warning(needed: int, card: Card, spills: bool) -> str | None:
    """Before a run that needs more than is free, where the driver would spill instead of refusing."""
    if not spills or needed <= card.free:
        return None
    return t(
        pt=f"o treino precisa de {gib(needed)} e {card.name} tem {gib(card.free)} livres de {gib(card.total)}: o driver "
        f"usaria a memória compartilhada do Windows, e cada passo levaria de 10 a 50 vezes mais. {_driver_setting()}",
        en=f"training needs {gib(needed)} and {card.name} has {gib(card.free)} free of {gib(card.total)}: the driver "
        f"would use Windows' shared memory, and each step would take 10 to 50 times longer. {_driver_setting()}",
    )


def _driver_setting() -> str:
    return t(
        pt="No Painel de Controle da NVIDIA, em Gerenciar as configurações em 3D, mude `CUDA - Sysmem Fallback Policy` "
        "para `Prefer No Sysmem Fallback`; feche programas que usam a placa; ou limite o treino com --vram",
        en="In the NVIDIA Control Panel, under Manage 3D settings, set `CUDA - Sysmem Fallback Policy` to `Prefer No "
        "Sysmem Fallback`; close programs that use the card; or limit the training with --vram",
    )


class SpillWatchdog:
    """Told of every step; says at most once that steps became several times slower with the card full."""

    def __init__(self, expected_seconds: float | None = None) -> None:
        """`expected_seconds` per step, where a prediction is at hand; else the fastest step so far is the measure."""
        self.expected, self.fastest = expected_seconds, float("inf")
        self.slow_steps = 0
        self.said = False

    def step(self, seconds: float, used: int, total: int) -> str | None:
        """`used`: bytes of the card that are taken, by everybody."""
        usual = self.expected or self.fastest
        slow = seconds > SLOWDOWN * usual and used > FULL_SHARE * total
        self.fastest = min(self.fastest, seconds)
        self.slow_steps = self.slow_steps + 1 if slow else 0
        if self.said or self.slow_steps < SLOW_STEPS:
            return None
        self.said = True
        times = seconds / usual
        return t(
            pt=f"os passos ficaram {times:.0f} vezes mais lentos ({seconds:.1f} s em vez de {usual:.1f} s) com "
            f"{gib(used)} de {gib(total)} da placa em uso: o driver deve estar usando memória compartilhada. "
            f"{_driver_setting()}",
            en=f"steps became {times:.0f} times slower ({seconds:.1f} s instead of {usual:.1f} s) with {gib(used)} of "
            f"{gib(total)} of the card in use: the driver is probably using shared memory. {_driver_setting()}",
        )
