"""Causal attention that never looks over the border of a text, at a cost that grows with the texts, not with the row.

A row may hold several texts end to end (packing). Instead of a (L, L) mask for each row, attention runs text by text: SDPA's
causal kernel needs no mask then, costs nothing for pairs of tokens that must not meet, and is exact on every device.
Windows (Mistral, Gemma) run in bands of queries that see only the keys of their window; capped scores (Gemma 2), which
no SDPA kernel knows, run in bands that are recomputed in the backward pass. So no (L, L) tensor is ever held.

transformers finds `attend` and `mask_of` under the name IMPLEMENTATION; each layer's mask is then a `Window` or None.
Left out: dropout on attention weights inside bands, attention sinks, and kernels for texts of unequal length (varlen).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine.host import is_fake
from ...engine.recompute import recompute

IMPLEMENTATION = "lora_trainer"
BAND_BYTES = 1 << 25
"""Scores held at once where they must be written out."""
WINDOW_BAND = 1024
"""Queries of a band under a window."""
MAX_FUSED_HEAD = 256
"""Largest head whose grouped keys SDPA shares among queries without copying them (CUDA's flash kernel)."""


@dataclass(frozen=True)
class Texts:
    """Lengths of the texts of each row, padding counted with the last; they add up to L."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def packed(self) -> bool:
        return any(len(row) > 1 for row in self.rows)


@dataclass(frozen=True)
class Window:
    """The mask of a layer whose tokens see `size` tokens back, themselves included."""

    size: int


def texts_of(segment_ids: Tensor | None, shape: torch.Size) -> Texts:
    """From (B, L): equal numbers side by side are one text, 0 is padding. Unknown numbers: one text a row."""
    batch, length = shape
    if segment_ids is None or is_fake(segment_ids):
        return Texts(((length,),) * batch)
    return Texts(tuple(_lengths(row) for row in segment_ids.tolist()))


def _lengths(row: list[int]) -> tuple[int, ...]:
    starts = [at for at in range(1, len(row)) if row[at] != row[at - 1] and row[at]]
    return tuple(end - start for start, end in zip([0, *starts], [*starts, len(row)], strict=True))


def register() -> None:
    """Make IMPLEMENTATION known to transformers. May be called again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask_of)


def mask_of(*args: Any, local_size: int | None = None, **kwargs: Any) -> Window | None:
    return Window(local_size) if local_size else None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    *,
    texts: Texts,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Queries (B, H, L, D), keys and values (B, G, L, D) -> (B, L, H, D). `texts` comes from the model's caller."""
    assert all(others.get(name) is None for name in ("s_aux", "position_bias")), "attention with sinks or biases"
    assert attention_mask is None or isinstance(attention_mask, Window), f"a mask of ours, not {type(attention_mask)}"
    rule = _Rule(attention_mask.size if attention_mask else None, softcap, scaling or query.shape[-1] ** -0.5, dropout)
    if not texts.packed:
        out = rule.apply(query, key, value)
    else:
        rows = [
            torch.cat([rule.apply(*parts) for parts in zip(*(x.split(row, 2) for x in one), strict=True)], 2)
            for row, *one in zip(texts.rows, query.split(1), key.split(1), value.split(1), strict=True)
        ]
        out = torch.cat(rows)
    return out.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class _Rule:
    """How tokens of one text see each other."""

    window: int | None
    softcap: float | None
    scale: float
    dropout: float

    def apply(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        if self.softcap is not None:
            assert not self.dropout, "capped attention has no dropout"
            height = max(1, BAND_BYTES // (4 * query.shape[0] * query.shape[1] * length))
            return self._bands(query, key, value, height, self._capped_band)
        if self.window is not None and length > self.window:
            return self._bands(query, key, value, WINDOW_BAND, self._masked_band)
        shared = key.shape[1] != query.shape[1]
        if shared and not _shares_keys(query):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
            shared = False
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True, scale=self.scale, enable_gqa=shared
        )

    def _bands(self, query: Tensor, key: Tensor, value: Tensor, height: int, band: Any) -> Tensor:
        """Some queries at a time, with the keys that any of them sees."""
        done, length = [], query.shape[2]
        for start in range(0, length, height):
            end = min(start + height, length)
            first = max(0, start - self.window + 1) if self.window is not None else 0
            parts = (query[:, :, start:end], key[:, :, first:end], value[:, :, first:end])
            done.append(band(*parts, start - first))
        return torch.cat(done, 2)

    def _visible(self, query: Tensor, key: Tensor, offset: int) -> Tensor:
        """(queries, keys) bool; the first query stands at key `offset`."""
        at = torch.arange(query.shape[2], device=query.device)[:, None] + offset
        to = torch.arange(key.shape[2], device=query.device)
        seen = to <= at
        return seen if self.window is None else seen & (to > at - self.window)

    def _masked_band(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        mask = self._visible(query, key, offset)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, mask, self.dropout, scale=self.scale)

    def _capped_band(self, query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        def compute(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """The queries of a group of heads stand side by side: their keys are not copied."""
            batch, groups = key.shape[:2]
            assert self.softcap is not None
            scores = query.reshape(batch, groups, -1, query.shape[-1]) @ key.transpose(2, 3) * self.scale
            scores = torch.tanh(scores / self.softcap) * self.softcap
            scores = scores.view(batch, groups, -1, query.shape[2], key.shape[2])
            scores = scores.masked_fill(~self._visible(query, key, offset), -torch.inf)
            shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
            return (shares.flatten(2, 3) @ value).view(query.shape)

        parts = (query, key, value)
        return recompute(compute, parts, {}) if torch.is_grad_enabled() else compute(*parts)


def _shares_keys(query: Tensor) -> bool:
    """Whether the fused kernel takes grouped keys as they are; on CUDA that is flash's, from capability 8.0."""
    if query.shape[-1] > MAX_FUSED_HEAD:
        return False
    return query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)
