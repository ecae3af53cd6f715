"""Encode and decode large images in overlapping tiles, and batches one image at a time.

One image at a time is exact. Tiles are not: each has group norms and an attention of its own, and only the seams are
blended. So latents that are trained on are better encoded whole where memory allows. diffusers does the work; it would
take its tiles from the VAE's config, which for SDXL (1024) leaves a 1024² image whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

TILE_PIXELS = 512
"""A tile's side: the peak is that of a 512² image, whatever the size."""
OVERLAP = 0.25
"""Share of a tile's side that its neighbour covers too."""

_ATTRIBUTES = ("use_tiling", "use_slicing", "tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")


@contextmanager
def tiled(vae: nn.Module, on: bool = True, *, tile_pixels: int = TILE_PIXELS) -> Iterator[None]:
    """Inside, images larger than a tile pass in tiles, and batches one by one; with `on` false nothing changes."""
    network = cast(Any, vae)
    before = {name: getattr(network, name) for name in _ATTRIBUTES}
    if on:
        factor = 2 ** (len(network.config.block_out_channels) - 1)
        assert tile_pixels % (4 * factor) == 0, "a quarter tile must be a whole number of latents"
        values = (True, True, tile_pixels, tile_pixels // factor, OVERLAP)
        _set(network, dict(zip(_ATTRIBUTES, values, strict=True)))
    try:
        yield
    finally:
        _set(network, before)


@contextmanager
def sliced(vae: nn.Module) -> Iterator[None]:
    """Inside, the images of a batch pass one by one: exact, and the peak is that of one image."""
    network = cast(Any, vae)
    before, network.use_slicing = network.use_slicing, True
    try:
        yield
    finally:
        network.use_slicing = before


def _set(network: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(network, name, value)
