"""Whether a base just loaded is what its file promised: numbers, and not mostly zeros."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..config.names import shown
from ..errors import SourceError, t
from .layers import AdaptedLayer

_MOST_ZERO = 0.05
"""Share of all-zero matrices in a part beyond which a base is refused; trained networks have none."""
_NOTHING = 1e-30
"""Zero, as packed weights come back."""


@torch.no_grad()
def check_base(model: nn.ModuleDict) -> list[str]:
    """Notices on a base just loaded; SourceError if it holds NaN or infinity, or if much of it is zeros.

    A download whose space was reserved but not filled reads as a whole file. Call it before the blocks are wrapped.
    """
    notices = []
    for part, module in model.items():
        kinds = {name: isinstance(layer, (nn.Linear, nn.Conv2d)) for name, layer in module.named_modules()}
        extremes = {name: _extremes(weight) for name, weight in _base_weights(module)}
        bad = [name for name, (low, high) in extremes.items() if not math.isfinite(low) or not math.isfinite(high)]
        if bad:
            raise _unusable_base(
                t(
                    pt=f"{part}: {len(bad)} de {len(extremes)} tensores têm NaN ou infinito ({bad[0]}, …)",
                    en=f"{part}: {len(bad)} of {len(extremes)} tensors hold NaN or infinity ({bad[0]}, …)",
                )
            )
        weights = [name for name in extremes if name.endswith("weight") and kinds[name.rpartition(".")[0]]]
        zero = [name for name in weights if max(map(abs, extremes[name])) < _NOTHING]
        told = t(
            pt=f"{part}: {len(zero)} de {len(weights)} matrizes de pesos só têm zeros ({', '.join(zero[:1])}, …)",
            en=f"{part}: {len(zero)} of {len(weights)} weight matrices hold nothing but zeros ({', '.join(zero[:1])}, …)",
        )
        if len(zero) > _MOST_ZERO * len(weights):
            raise _unusable_base(told)
        notices += [told] if zero else []
    return notices


def _base_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating weights by name, packed ones unpacked one at a time when looked at; not the adapters' own."""
    for name, layer in module.named_modules():
        if ".lora_" in f".{name}":
            continue
        trained = isinstance(layer, AdaptedLayer)
        own = {key: value for key, value in layer._parameters.items() if value is not None and not trained}
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            own["weight"] = layer.weight  # of a packed layer, a property
        yield from ((f"{name}.{key}", value) for key, value in own.items() if value.is_floating_point())


def _extremes(weight: Tensor) -> tuple[float, float]:
    """Smallest and largest value, NaN if there is one: one pass, no copy."""
    if not weight.numel():
        return 0.0, 0.0
    packed = getattr(weight, "layer", None)  # unpacked here, where a memory tracker sees what that takes
    low, high = torch.aminmax(weight.detach() if packed is None else packed.unpacked())
    return float(low), float(high)


def _unusable_base(cause: str) -> SourceError:
    return SourceError.said(
        pt=f"os pesos do modelo base não servem: {cause}",
        en=f"the base model's weights are unusable: {cause}",
        hint_pt="o download deve ter sido interrompido ou alterado: baixe o modelo de novo e confira o hash",
        hint_en="the download was probably cut short or altered: download the model again and check its hash",
        where=shown("model", "base_model"),
    )
