"""The cards people have, as rows: what `--placa "gtx 1660 super"` plans for.

Memory is what the driver reports (MiB; of data-centre cards with ECC on). TFLOPS are dense, with 16-bit inputs and float32 sums
as training uses them, from NVIDIA's architecture whitepapers and data sheets; of cards without tensor cores, those of float32.
Link: GB/s that page-locked copies reach on the card's own PCIe connection (about 80 % of its rate). Laptop parts are listed at
the usual power.
"""

import difflib
import re
from dataclasses import dataclass

from ..errors import ConfigError, t
from .card import Card

MIB = 2**20
DISPLAY_BYTES = 600 * MIB
"""What a desktop with a browser usually holds of a card that drives a screen (nvidia-smi of idle machines: 0.3 to 1.0 GiB)."""

PCIE_3, PCIE_4_X8, PCIE_4, PCIE_5_X8, PCIE_5 = 12.0, 12.5, 25.0, 25.0, 50.0


@dataclass(frozen=True)
class Model:
    """A kind of card. `screen`: people have a display on it."""

    name: str
    mib: int
    capability: tuple[int, int]
    tflops: float
    link: float
    screen: bool = True

    @property
    def total(self) -> int:
        """Bytes."""
        return self.mib * MIB

    @property
    def usually_free(self) -> int:
        """Bytes, before this process makes its context."""
        return self.total - (DISPLAY_BYTES if self.screen else 0)

    def card(self) -> Card:
        """As if it were in this machine, idle."""
        return Card(self.name, self.capability, self.total, self.usually_free, context_made=False, display=self.screen)


def _rows(capability: tuple[int, int], link: float, *rows: tuple[str, int, float], screen: bool = True) -> list[Model]:
    return [Model(name, mib, capability, tflops, link, screen) for name, mib, tflops in rows]


MODELS: tuple[Model, ...] = (
    *_rows((6, 1), PCIE_3,
        ("GTX 1050 Ti", 4096, 2.1), ("GTX 1060 3GB", 3072, 3.9), ("GTX 1060 6GB", 6144, 4.4), ("GTX 1070", 8192, 6.5),
        ("GTX 1070 Ti", 8192, 8.2), ("GTX 1080", 8192, 8.9), ("GTX 1080 Ti", 11264, 11.3), ("TITAN Xp", 12288, 12.1)),
    *_rows((7, 5), PCIE_3,
        ("GTX 1630", 4096, 1.8), ("GTX 1650", 4096, 3.0), ("GTX 1650 SUPER", 4096, 4.4), ("GTX 1660", 6144, 5.0),
        ("GTX 1660 SUPER", 6144, 5.0), ("GTX 1660 Ti", 6144, 5.4), ("RTX 2060", 6144, 26), ("RTX 2060 12GB", 12288, 29),
        ("RTX 2060 SUPER", 8192, 29), ("RTX 2070", 8192, 30), ("RTX 2070 SUPER", 8192, 36), ("RTX 2080", 8192, 40),
        ("RTX 2080 SUPER", 8192, 45), ("RTX 2080 Ti", 11264, 54), ("TITAN RTX", 24576, 130), ("Quadro RTX 4000", 8192, 57),
        ("Quadro RTX 5000", 16384, 89), ("GTX 1650 Laptop", 4096, 2.9), ("GTX 1660 Ti Laptop", 6144, 4.9),
        ("RTX 2060 Laptop", 6144, 19), ("RTX 2070 Laptop", 8192, 22)),
    *_rows((8, 6), PCIE_4_X8,
        ("RTX 3050 6GB", 6144, 13), ("RTX 3050 8GB", 8192, 18), ("RTX 3050 Laptop", 4096, 14), ("RTX 3050 Ti Laptop", 4096, 17)),
    *_rows((8, 6), PCIE_4,
        ("RTX 3060", 12288, 26), ("RTX 3060 8GB", 8192, 26), ("RTX 3060 Ti", 8192, 32), ("RTX 3070", 8192, 41),
        ("RTX 3070 Ti", 8192, 43), ("RTX 3080", 10240, 60), ("RTX 3080 12GB", 12288, 61), ("RTX 3080 Ti", 12288, 68),
        ("RTX 3090", 24576, 71), ("RTX 3090 Ti", 24576, 80), ("RTX A2000", 6138, 32), ("RTX A2000 12GB", 12282, 32),
        ("RTX A4000", 16376, 77), ("RTX A4500", 20470, 95), ("RTX A5000", 24564, 111), ("RTX A6000", 49140, 155)),
    *_rows((8, 6), PCIE_3,
        ("RTX 3060 Laptop", 6144, 21), ("RTX 3070 Laptop", 8192, 30), ("RTX 3080 Laptop", 8192, 36),
        ("RTX 3080 Laptop 16GB", 16384, 36)),
    *_rows((8, 9), PCIE_4_X8,
        ("RTX 4050 Laptop", 6141, 18), ("RTX 4060", 8188, 30), ("RTX 4060 Laptop", 8188, 23), ("RTX 4060 Ti", 8188, 44),
        ("RTX 4060 Ti 16GB", 16380, 44), ("RTX 4070 Laptop", 8188, 31)),
    *_rows((8, 9), PCIE_4,
        ("RTX 4070", 12282, 58), ("RTX 4070 SUPER", 12282, 71), ("RTX 4070 Ti", 12282, 80), ("RTX 4070 Ti SUPER", 16376, 88),
        ("RTX 4080", 16376, 97), ("RTX 4080 SUPER", 16376, 104), ("RTX 4090", 24564, 165), ("RTX 4080 Laptop", 12282, 49),
        ("RTX 4090 Laptop", 16376, 66), ("RTX 4000 Ada", 20475, 107), ("RTX 6000 Ada", 49140, 364)),
    *_rows((12, 0), PCIE_5_X8,
        ("RTX 5050", 8151, 26), ("RTX 5060", 8151, 38), ("RTX 5060 Laptop", 8151, 30), ("RTX 5060 Ti 8GB", 8151, 47),
        ("RTX 5060 Ti 16GB", 16311, 47), ("RTX 5070 Laptop", 8151, 36)),
    *_rows((12, 0), PCIE_5,
        ("RTX 5070", 12227, 62), ("RTX 5070 Ti", 16303, 88), ("RTX 5080", 16303, 113), ("RTX 5090", 32607, 210),
        ("RTX 5070 Ti Laptop", 12227, 46), ("RTX 5080 Laptop", 16303, 60), ("RTX 5090 Laptop", 24463, 78)),
    *_rows((6, 0), PCIE_3, ("Tesla P100", 16384, 19), screen=False),
    *_rows((6, 1), PCIE_3, ("Tesla P4", 7680, 5.5), ("Tesla P40", 24576, 11.8), screen=False),
    *_rows((7, 0), PCIE_3, ("Tesla V100", 16384, 112), ("Tesla V100 32GB", 32768, 112), screen=False),
    *_rows((7, 5), PCIE_3, ("Tesla T4", 15360, 65), screen=False),
    *_rows((8, 0), PCIE_4, ("A30", 24576, 165), ("A100 40GB", 40960, 312), ("A100 80GB", 81920, 312), screen=False),
    *_rows((8, 6), PCIE_4, ("A2", 15356, 18), ("A10", 23028, 125), ("A10G", 23028, 70), ("A40", 46068, 150), screen=False),
    *_rows((8, 9), PCIE_4, ("L4", 23034, 121), ("L40S", 46068, 362), screen=False),
    *_rows((9, 0), PCIE_5, ("H100", 81559, 756), ("H200", 143771, 989), screen=False),
)  # fmt: skip

COMMON = {4: "GTX 1650", 6: "RTX 2060", 8: "RTX 3060 Ti", 12: "RTX 3060", 16: "RTX 4060 Ti 16GB", 24: "RTX 3090", 48: "RTX A6000"}
"""GiB -> the card that stands for all of that size, where only a size is given."""


def model(name: str) -> Model:
    """As people write it: "gtx 1660 super", "NVIDIA GeForce RTX 3060 Laptop GPU", "4090". Raises ConfigError for others."""
    wanted = _spelled(name)
    found = [one for one in MODELS if _spelled(one.name) == wanted]
    if not found:
        found = [one for one in MODELS if wanted and any(known.endswith(wanted) for known in _spellings(one.name))]
        found.sort(key=lambda one: -one.mib)  # of one name, the usual size
    if not found:
        raise _unknown(name, wanted)
    return found[0]


def of_size(gib: float) -> Model:
    """The common card whose size is nearest."""
    return model(COMMON[min(COMMON, key=lambda size: abs(size - gib))])


_WORDS = re.compile(r"nvidia|geforce|graphics|gpu|quadro|tesla|with max-q design|[^a-z0-9]", re.IGNORECASE)
_SIZE = re.compile(r" \d+GB$")


def _spellings(name: str) -> tuple[str, str]:
    """With the size that is part of some names, and without."""
    return _spelled(name), _spelled(_SIZE.sub("", name))


def _spelled(name: str) -> str:
    """Without what is written now with and now without: "gtx1660super"."""
    return _WORDS.sub("", name.lower().replace("mobile", "laptop"))


def _unknown(name: str, wanted: str) -> ConfigError:
    spelled = {_spelled(one.name): one.name for one in MODELS}
    near = [spelled[key] for key in difflib.get_close_matches(wanted, spelled, n=3, cutoff=0.6)]
    known = ", ".join(near or [one.name for one in MODELS])
    return ConfigError(
        t(pt=f"não conheço a placa `{name}`", en=f"unknown card `{name}`"),
        t(pt=f"você quis dizer: {known}? Senão, diga o tamanho: --vram 8", en=f"did you mean: {known}? Else give a size: --vram 8"),
        t(pt="memoria.placa", en="memory.card"),
    )
