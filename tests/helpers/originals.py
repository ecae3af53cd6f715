"""A transformer's weights under the names of its original, where some of diffusers' matrices are one."""

from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.bases.originals import Original
from lora_trainer.bases.weights import Share


def original_state(transformer: nn.Module, original: Original) -> dict[str, Tensor]:
    """What diffusers' converter turns back into the transformer's own state."""
    config: Any = transformer.config
    pieces = original.places_of(config).pieces
    parts: dict[str, dict[Share, Tensor]] = {}
    for name, value in transformer.state_dict().items():
        if (piece := pieces.get(name)) is None:
            parts[name] = {(0, 1): value}  # type: ignore[dict-item]
            continue
        value = torch.cat(value.chunk(2)[::-1]) if piece.swapped else value
        parts.setdefault(piece.key, {})[piece.share] = value
    return {key: torch.cat([shares[at] for at in sorted(shares)]) if len(shares) > 1 else next(iter(shares.values()))
            for key, shares in parts.items()}  # fmt: skip
