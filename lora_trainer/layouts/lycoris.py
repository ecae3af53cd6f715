"""LoHa and LoKr as plain tensors, by the names that LyCORIS gives their factors: `hada_w1_a`, `lokr_w1`.

A LoKr of two whole factors has no scale (readers ignore its alpha). Left out: Tucker forms (`hada_t1`, `lokr_t2`) and DoRA on
top, which are refused by name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

TITLES = {"loha": "LoHa", "lokr": "LoKr"}
FACTORS = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
}
_SCALED = ("hada_w2_a", "lokr_w2", "lokr_w2_b")
"""The factor that takes up a scale."""


@dataclass(frozen=True)
class LycorisModule:
    """`factors` by their names in files; `rank` of the low-rank form, also where this module has none."""

    factors: dict[str, Tensor]
    scale: float
    rank: int

    @property
    def alpha(self) -> float:
        """What readers divide by the rank to get the scale."""
        return self.scale * self.rank

    @property
    def matrices(self) -> list[Tensor]:
        """What `balanced` moves sizes between."""
        return list(self.factors.values())

    def delta(self) -> Tensor:
        """Change of the weight: (out, in) or (out, in · kh · kw)."""
        factors = {name: factor.float() for name, factor in self.factors.items()}
        if "hada_w1_a" in factors:
            w1_a, w1_b, w2_a, w2_b = (factors[name] for name in FACTORS["loha"])
            return self.scale * (w1_a @ w1_b) * (w2_a @ w2_b)
        return self.scale * torch.kron(_whole(factors, "lokr_w1"), _whole(factors, "lokr_w2").flatten(1).contiguous())

    def change(self, weight: Tensor) -> Tensor:
        """Of this very weight: as `delta`, which is the same for all."""
        return self.delta()

    def with_scale(self, scale: float) -> "LycorisModule":
        """The same effect under another scale; the difference goes into one factor."""
        name = next(name for name in _SCALED if name in self.factors)
        factors = {**self.factors, name: self.factors[name] * (self.scale / scale)}
        return replace(self, factors=factors, scale=scale)

    def balanced(self) -> "LycorisModule":
        """The same effect with factors of about equal size; powers of two move between them: nothing is rounded."""
        sizes = {name: float(factor.abs().max()) for name, factor in self.factors.items()}
        if not all(sizes.values()):
            return self
        mean = sum(math.log2(size) for size in sizes.values()) / len(sizes)
        shifts = {name: round(mean - math.log2(size)) for name, size in sizes.items()}
        shifts[next(iter(shifts))] -= sum(shifts.values())
        return replace(self, factors={name: factor * 2.0 ** shifts[name] for name, factor in self.factors.items()})


def _whole(factors: Mapping[str, Tensor], name: str) -> Tensor:
    return factors[name] if name in factors else factors[f"{name}_a"] @ factors[f"{name}_b"].flatten(1)


Lycoris = dict[str, LycorisModule]
"""Module path -> its LoHa or LoKr."""


def kind_of(names: Iterable[str]) -> str:
    """lora, loha or lokr, by the keys of a file."""
    ends = {name.rpartition(".")[2] for name in names}
    return next((kind for kind, factors in FACTORS.items() if ends & set(factors)), "lora")
