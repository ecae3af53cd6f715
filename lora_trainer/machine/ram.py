"""Host RAM: how much a run may use, and a word before it runs out.

A process that uses up RAM is killed without a message, so the check comes before anything large is read. Left out:
limits of containers and job schedulers, which psutil does not see.
"""

from dataclasses import dataclass

import psutil

from ..config.schema import MemoryConfig
from ..errors import t
from ..units import GIB, gib

RESERVE = GIB
"""Left to the system and to other programs, at least; a tenth of the machine's RAM where that is more."""


@dataclass(frozen=True)
class Ram:
    """Bytes. `available` is what can be had without swapping."""

    total: int
    available: int
    swap: int = 0

    @classmethod
    def read(cls) -> "Ram":
        memory = psutil.virtual_memory()
        return cls(int(memory.total), int(memory.available), int(psutil.swap_memory().free))


def ram_budget(memory: MemoryConfig, ram: Ram) -> int:
    """Bytes that masters of streamed blocks, offloaded activations and the data may take together."""
    if memory.ram is not None:
        return int(memory.ram * GIB)
    return max(0, ram.available - max(RESERVE, ram.total // 10))


def ram_notice(needed: int, ram: Ram) -> str | None:
    """A warning with numbers when `needed` bytes exceed free RAM, or even RAM and swap together."""
    if needed <= ram.available:
        return None
    numbers = t(
        pt=f"o modelo precisa de {gib(needed)} de RAM; há {gib(ram.available)} livres de {gib(ram.total)} e "
        f"{gib(ram.swap)} de memória virtual",
        en=f"the model needs {gib(needed)} of RAM; {gib(ram.available)} of {gib(ram.total)} and {gib(ram.swap)} of swap "
        "are free",
    )
    if needed <= ram.available + ram.swap:
        return numbers + t(
            pt=": vai caber, mas devagar. Feche outros programas, ou use memoria.mestre_em_disco: sim",
            en=": it will fit, but slowly. Close other programs, or set memory.mapped_master: yes",
        )
    return numbers + t(
        pt=": o sistema pode encerrar o treino sem aviso. Feche outros programas, use memoria.mestre_em_disco: sim ou "
        "aumente a memória virtual (no Windows, de 1,5 a 2 vezes a RAM, num SSD)",
        en=": the system may kill the training without a word. Close other programs, set memory.mapped_master: yes or "
        "enlarge the swap file (on Windows, 1.5 to 2 times the RAM, on an SSD)",
    )

