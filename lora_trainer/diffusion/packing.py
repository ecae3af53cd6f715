"""Latents as FLUX.1 and its kin take them: 2 x 2 of their pixels are a token, whose place is a row and a column."""

import torch
from torch import Tensor

PATCH = 2


def pack(latents: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H/2 · W/2, 4C)."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH**2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse; `height` and `width` of the latents."""
    cells = tokens.view(len(tokens), height // PATCH, width // PATCH, -1, PATCH, PATCH)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), -1, height, width)


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows · columns, 3): nothing, row, column."""
    row = torch.arange(rows, device=device, dtype=torch.float32)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device, dtype=torch.float32)[None, :].expand(rows, columns)
    return torch.stack([torch.zeros_like(row), row, column], -1).reshape(-1, 3)
