"""PiSSA (Meng et al. 2024): train what the frozen weight does most, its r principal components.

The paper takes them out of the base. Here the base stays whole, packed or streamed as it may be, and the layer adds what
B A has become less what B₀ A₀ was: (B - B₀) A₀ + B (A - A₀), which is exactly nothing at the start, and of which the file
holds the two products, a plain LoRA of rank 2r for the original base. Both terms are as small as the change itself, so
nothing is lost to 16 bits. The components come from a randomised SVD (Halko et al. 2011, alg. 4.4 and 5.1), one weight at a
time. Left out: what the paper gains on a base quantised after they were taken out.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn

from ..layouts.lora import LoraModule

STARTS = ("start_A", "start_B")
"""Buffers of a layer: bfloat16, in which A and B begin, so that the difference to them is exact."""
OVERSAMPLING, PASSES = 8, 4
AT_ONCE = 1 << 22
"""Weights in float32 at a time."""


class Principal(LoraVariant):
    """How peft's layer is told to compute the difference."""

    @staticmethod
    def forward(module: LoraLayer, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        matrices: list[Any] = [module.lora_A[active_adapter], module.lora_B[active_adapter]]
        start_a, start_b = (getattr(module, name) for name in STARTS)
        a, b = (matrix.weight for matrix in matrices)
        down, up = matrices
        from_old = _apply(up, b - start_b.to(b.dtype), _apply(down, start_a.to(x.dtype), x))
        from_new = _apply(up, b, _apply(down, a - start_a.to(a.dtype), x))
        return result + (from_old + from_new) * module.scaling[active_adapter]


def _apply(matrix: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    if isinstance(matrix, nn.Conv2d):
        return F.conv2d(x, weight, None, matrix.stride, matrix.padding, matrix.dilation)
    return F.linear(x, weight)


@torch.no_grad()
def prepare(layer: LoraLayer, name: str) -> None:
    """Room for the start, and the forward pass that measures from it."""
    for matrix, buffer in zip((layer.lora_A[name], layer.lora_B[name]), STARTS, strict=True):
        layer.register_buffer(buffer, torch.empty_like(matrix.weight, dtype=torch.bfloat16), persistent=False)
    layer.stays = STARTS  # with the matrices, where blocks come and go
    layer.lora_variant[name] = Principal()


@torch.no_grad()
def start(layer: LoraLayer, name: str, generator: torch.Generator, device: torch.device | None = None) -> None:
    """A and B from the base's weight. `device`: where to compute, if not where the weight is."""
    weight = layer.base_layer.weight.detach().flatten(1)
    if weight.is_meta:
        return
    found = components(weight, int(layer.r[name]), generator, device or weight.device)
    share = float(layer.scaling[name]) ** -0.5  # B A times the scale is the weight's part
    for matrix, value, buffer in zip((layer.lora_A[name], layer.lora_B[name]), found, STARTS, strict=True):
        kept = getattr(layer, buffer)
        kept.copy_((share * value).view(kept.shape))
        matrix.weight.copy_(kept)


def exported(plain: LoraModule, start_a: Tensor, start_b: Tensor) -> LoraModule:
    """As a file holds it: a LoRA of rank 2r."""
    down, up = torch.cat([start_a, plain.down - start_a]), torch.cat([plain.up - start_b, plain.up], 1)
    return replace(plain, down=down, up=up).balanced_by_component()


def apart(module: LoraModule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B and their starts, of which `exported` would make this module of rank 2r."""
    rank = module.rank // 2
    old, new = module.down[:rank], module.down[rank:]
    change, up = module.up[:, :rank], module.up[:, rank:]
    return old + new, up, old, up - change


def rehearse(layers: Iterable[Any], name: str) -> None:
    """Hold what `start` would, under a simulation; layers of one shape and kind need the same."""
    kinds = {(type(layer.base_layer), layer.weight.shape, layer.weight.dtype, layer.r[name]): layer for layer in layers}
    for layer in kinds.values():
        weight = layer.base_layer.weight.detach().flatten(1)
        components(weight, int(layer.r[name]), torch.Generator(), weight.device)


def components(
    weight: Tensor, rank: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(A (rank, in), B (out, rank)) in float32 with B A the best of that rank; zeros beyond the weight's own rank."""
    rows, columns = weight.shape
    width = min(rank + OVERSAMPLING, rows, columns)
    basis = torch.randn(columns, width, generator=generator).to(device)
    for _ in range(PASSES):
        basis = torch.linalg.qr(_times(weight, torch.linalg.qr(_times(weight, basis))[0], transposed=True))[0]
    left, sizes, right = torch.linalg.svd(_times(weight, basis), full_matrices=False)
    found = min(rank, width)
    roots = sizes[:found].sqrt()
    a, b = torch.zeros(rank, columns, device=device), torch.zeros(rows, rank, device=device)
    a[:found], b[:, :found] = roots[:, None] * (right[:found] @ basis.T), left[:, :found] * roots
    return a, b


def _times(weight: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """weight @ matrix or weightᵀ @ matrix, some rows at a time."""
    height = max(1, AT_ONCE // weight.shape[1])
    parts = ((weight[at : at + height].to(matrix.device, torch.float32), at) for at in range(0, len(weight), height))
    if transposed:
        return torch.stack([rows.T @ matrix[at : at + len(rows)] for rows, at in parts]).sum(0)
    return torch.cat([rows @ matrix for rows, _ in parts])
