"""Cross-entropy over the label tokens without their logits: a language model's logits outweigh all its other activations.

Ignored tokens are dropped before the head. The head then runs on a few tokens at a time, and each chunk's gradient with
respect to the hidden states is worked out at once, in the forward pass, so that a chunk's logits are gone before the next
one's come to be; the backward pass only scales what is there. A head whose weight is kept in host memory comes in by
rows of its vocabulary instead: once for the normaliser of the softmax, once for the gradient.

A head that is trained (an adapter on it) goes through its own module, chunk by chunk, recomputed in the backward pass.
Sums are float32. Left out: fused kernels (Liger, cut-cross-entropy), which save time, hardly memory.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...engine.host import is_fake
from ...engine.recompute import recompute
from ...engine.tracker import count_transfer, host_memory

IGNORED = -100
CHUNK_BYTES = 1 << 27
"""Logits held at once, in the compute dtype and in float32."""
BYTES_A_LOGIT = 8
TILE_ROWS = 8192
"""Rows of a head that are brought in, or unpacked, at once: a packed head's packing must be row by row."""
TILED_TOKENS = 8192
"""Tokens that such a head comes in for: their gradients are summed in float32."""


@dataclass(frozen=True)
class Head:
    """From hidden states (…, D) to logits (…, V): cap · tanh(scale · linear / cap)."""

    module: nn.Module
    scale: float = 1.0
    softcap: float | None = None

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for p in self.module.parameters())

    @property
    def in_tiles(self) -> bool:
        """Whether its weight is not there to be used whole: it lives in host memory, or is packed."""
        return hasattr(self.module, "home") or hasattr(_holder(self.module), "packed")

    def shaped(self, logits: Tensor) -> Tensor:
        """The head's output made float32 logits, out of place."""
        logits = logits.float() * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


@dataclass(frozen=True)
class Targets:
    """The tokens to be predicted, each at the place of its predecessor: all (N,)."""

    places: Tensor
    """Among the B · L hidden states."""
    tokens: Tensor
    weights: Tensor
    """float32."""


def count_targets(labels: Tensor) -> int:
    """Labels (B, L) that a predecessor predicts; of fakes, the most there can be."""
    shifted = labels[:, 1:]
    return shifted.numel() if is_fake(labels) else int((shifted != IGNORED).sum())


def find_targets(labels: Tensor, weight: Tensor) -> Targets:
    """Labels (B, L), example weights (B,). Fake labels are all kept: the worst case."""
    batch, length = labels.shape
    tokens = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    if is_fake(labels):
        places = torch.arange(batch * (length - 1), device=labels.device)
    else:
        places = (tokens != IGNORED).nonzero().squeeze(1)
    weights = weight.float()[:, None].expand(batch, length).reshape(-1)
    return Targets(places, tokens[places], weights[places])


def sum_of_losses(head: Head, hidden: Tensor, targets: Targets) -> Tensor:
    """Hidden states (B, L, D) -> () float32: the weighted sum of the targets' negative log-likelihoods."""
    states = hidden.reshape(-1, hidden.shape[-1])
    if head.trained:
        return _through_module(head, states, targets)
    return cast(Tensor, _LossWithGradient.apply(states, head, targets))


def chunk_size(vocabulary: int) -> int:
    """Tokens."""
    return max(16, CHUNK_BYTES // (BYTES_A_LOGIT * vocabulary))


def _through_module(head: Head, states: Tensor, targets: Targets) -> Tensor:
    def loss(states: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        each = F.cross_entropy(head.shaped(head.module(states)), tokens, reduction="none")
        return (each * weights).sum()

    size = chunk_size(cast(int, cast(Any, head.module).out_features))
    total = states.new_zeros((), dtype=torch.float32)
    for place, token, weight in _chunks(targets, size):
        parts = (states.index_select(0, place), token, weight)
        total = total + (recompute(loss, parts, {}) if torch.is_grad_enabled() else loss(*parts))
    return total


def _chunks(targets: Targets, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    parts = (targets.places.split(size), targets.tokens.split(size), targets.weights.split(size))
    return ((p, t, w) for p, t, w in zip(*parts, strict=True) if len(p))


class _LossWithGradient(torch.autograd.Function):
    """Of a frozen head."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Head, targets: Targets) -> Tensor:
        gradient = torch.zeros_like(states) if ctx.needs_input_grad[0] else None
        work = _tiled if head.in_tiles else _chunked
        total = work(head, states, targets, gradient)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(factor), None, None  # in place: a second backward pass is refused by its version


def _chunked(head: Head, states: Tensor, targets: Targets, gradient: Tensor | None) -> Tensor:
    layer = cast(Any, head.module)
    weight, bias = layer.weight.detach(), layer.bias
    total = states.new_zeros((), dtype=torch.float32)
    for place, token, share in _chunks(targets, chunk_size(len(weight))):
        logits, slope = _shape_in_place(head, F.linear(states[place], weight, bias), gradient is not None)
        top = logits.amax(1, keepdim=True)
        picked = logits.gather(1, token[:, None])
        mass = logits.sub_(top).exp_().sum(1, keepdim=True)
        total += ((mass.log() + top - picked).squeeze(1) * share).sum()
        if gradient is None:
            continue
        logits.div_(mass).scatter_add_(1, token[:, None], torch.full_like(mass, -1.0))
        logits.mul_(share[:, None] * head.scale)
        if slope is not None:
            logits.mul_(slope)
        gradient[place] = (logits.to(weight.dtype) @ weight).to(gradient.dtype)
    return total


def _shape_in_place(head: Head, raw: Tensor, want_slope: bool) -> tuple[Tensor, Tensor | None]:
    """float32 logits from the head's output, and the derivative that the cap brings."""
    logits = raw.float()
    if head.scale != 1:
        logits.mul_(head.scale)
    if head.softcap is None:
        return logits, None
    logits.div_(head.softcap).tanh_()
    slope = (1 - logits.square()) if want_slope else None
    return logits.mul_(head.softcap), slope


def _tiled(head: Head, states: Tensor, targets: Targets, gradient: Tensor | None) -> Tensor:
    total = states.new_zeros((), dtype=torch.float32)
    for place, token, share in _chunks(targets, TILED_TOKENS):
        total += _tiled_part(head, states, Targets(place, token, share), gradient)
    return total


def _tiled_part(head: Head, states: Tensor, targets: Targets, gradient: Tensor | None) -> Tensor:
    """Rows of the vocabulary are the outer loop: each crosses to the device twice."""
    count = len(targets.places)
    top = torch.full((count, 1), -torch.inf, device=states.device)
    mass, picked = torch.zeros_like(top), torch.zeros_like(top)
    for start, weight, bias in _tiles(head.module, states):
        for part in _parts(count):
            logits, _ = _shape_in_place(head, F.linear(states[targets.places[part]], weight, bias), False)
            inside, local = _inside(targets.tokens[part], start, len(weight))
            picked[part] += logits.gather(1, local) * inside
            highest = torch.maximum(top[part], logits.amax(1, keepdim=True))
            mass[part] = mass[part] * (top[part] - highest).exp() + logits.sub_(highest).exp_().sum(1, keepdim=True)
            top[part] = highest
    if gradient is not None:
        _tiled_gradient(head, states, targets, (top, mass), gradient)
    return ((mass.log() + top - picked).squeeze(1) * targets.weights).sum()


def _tiled_gradient(
    head: Head, states: Tensor, targets: Targets, softmax: tuple[Tensor, Tensor], gradient: Tensor
) -> None:
    """Summed over the tiles in float32; `softmax` holds each token's largest logit and its normaliser."""
    top, mass = softmax
    summed = torch.zeros(len(targets.places), states.shape[1], device=states.device)
    for start, weight, bias in _tiles(head.module, states):
        for part in _parts(len(summed)):
            logits, slope = _shape_in_place(head, F.linear(states[targets.places[part]], weight, bias), True)
            inside, local = _inside(targets.tokens[part], start, len(weight))
            logits.sub_(top[part]).exp_().div_(mass[part]).scatter_add_(1, local, -inside)
            logits.mul_(targets.weights[part, None] * head.scale)
            if slope is not None:
                logits.mul_(slope)
            summed[part] += logits.to(weight.dtype) @ weight
    gradient[targets.places] = summed.to(gradient.dtype)


def _tiles(layer: Any, states: Tensor) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """First row, rows of the weight, their bias: where the states are, in 16 bits or whatever they are unpacked to."""
    for start in range(0, layer.out_features, TILE_ROWS):
        rows = slice(start, min(start + TILE_ROWS, layer.out_features))
        bias = None if layer.bias is None else layer.bias[rows].to(states.device)
        yield start, _rows(_holder(layer), rows, states.device), bias


def _rows(holder: Any, rows: slice, device: torch.device) -> Tensor:
    away = hasattr(holder, "home")

    def here(tensor: Tensor) -> Tensor:
        with host_memory() if away else nullcontext():
            piece = tensor.detach()[rows]
        if not away:
            return piece
        count_transfer(piece.nbytes)
        return piece.to(device, copy=True, non_blocking=True)

    if not hasattr(holder, "packed"):
        return here(holder.weight)
    parts = [here(tensor) for tensor in holder.packed()]
    shape = torch.Size([rows.stop - rows.start, holder.weight_shape[1]])
    return cast(Tensor, holder.packing.unpack(parts, shape, holder.weight_dtype))


def _holder(layer: Any) -> Any:
    """The layer that has the weight: of a tied head, the embeddings."""
    return getattr(layer, "holder", layer)


def _parts(count: int) -> list[slice]:
    size = chunk_size(TILE_ROWS)
    return [slice(at, min(at + size, count)) for at in range(0, count, size)]


def _inside(tokens: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """(n, 1) each: 1.0 where the token is among these rows, and its row (some row where it is not)."""
    local = tokens - start
    inside = (local >= 0) & (local < rows)
    return inside.float()[:, None], local.clamp(0, rows - 1)[:, None]
