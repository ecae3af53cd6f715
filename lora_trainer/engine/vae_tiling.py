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
DECODED_TILED_ABOVE = 768 * 768
"""Pixels of a picture that is drawn in tiles where nobody says otherwise: 1.1 instead of 3.4 GiB at 1024²."""


def decodes_tiled(choice: str, size: tuple[int, int]) -> bool:
    """Whether a preview of `size` (width, height) in pixels is decoded in tiles; `choice` is auto, yes or no.

    Pictures to look at are in tiles earlier than latents to train on.
    """
    return choice == "yes" or (choice == "auto" and size[0] * size[1] > DECODED_TILED_ABOVE)


def tiles_change(size: tuple[int, int]) -> bool:
    """Whether tiles make a difference: an image no larger than one tile passes whole."""
    return max(size) > TILE_PIXELS


@contextmanager
def tiled(vae: nn.Module, on: bool = True, *, tile_pixels: int | None = None) -> Iterator[None]:
    """Inside, images larger than a tile pass in tiles, and batches one by one; with `on` false nothing changes."""
    network, tile_pixels = cast(Any, vae), tile_pixels or TILE_PIXELS
    settings = _settings(network, tile_pixels)
    before = {name: getattr(network, name) for name in settings}
    if on:
        _set(network, settings)
    try:
        yield
    finally:
        _set(network, before)


def _settings(network: Any, tile_pixels: int) -> dict[str, Any]:
    """In the words of the network: most tell the overlap, those that come from video models the step between tiles."""
    common: dict[str, Any] = {"use_tiling": True, "use_slicing": True}
    if hasattr(network, "tile_sample_stride_height"):
        factor, step = network.spatial_compression_ratio, int(tile_pixels * (1 - OVERLAP))
        sides = {f"tile_sample_min_{side}": tile_pixels for side in ("height", "width")}
        common |= sides | {f"tile_sample_stride_{side}": step for side in ("height", "width")}
    else:
        factor = 2 ** (len(network.config.block_out_channels) - 1)
        sizes = {"tile_sample_min_size": tile_pixels, "tile_latent_min_size": tile_pixels // factor}
        common |= sizes | {"tile_overlap_factor": OVERLAP}
    assert tile_pixels % (4 * factor) == 0, "a quarter tile must be a whole number of latents"
    return common


def _set(network: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(network, name, value)
