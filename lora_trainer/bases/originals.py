"""Original layouts of transformers: where each parameter of diffusers' lies in files that the original's programs read.

diffusers' own converter (`diffusers.loaders.single_file_utils`) is run once, over names instead of weights. Each name is
given a stand-in that only remembers which share of which tensor's rows it is; what comes out beside a parameter is its place:
the tensor, which part of a fused one, and whether its halves are exchanged. Shares know no width, so converters that have the
released model's written into them (FLUX's, Chroma's) are right for any. What a converter asks for by name need not be given.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch

from ..files.headers import Header
from ..files.kinds import Part, find_part
from ..seam.slots import Slot, flat
from .weights import WHOLE, Piece, Share, Spelled

_NUMBER = re.compile(r"(?:blocks|layers|refiner)\.(\d+)\.")


@dataclass(frozen=True)
class Original:
    """An original layout, by what tells diffusers' converter how it looks."""

    converter: str
    """A function of diffusers' single_file_utils."""
    names: tuple[str, ...]
    """Tensors that a file has ("{}" for the number of a block). A converter that asks for tensors by name, rather than
    renaming what there is, needs only so many that it knows which blocks there are."""
    marks: tuple[str, ...]
    """Tensors by any of which a file in this layout is told: those with diffusers' names lack them."""

    def places(self, blocks: int) -> "Places":
        """For so many blocks in each of its lists, or fewer."""
        return _places(self, blocks)

    def places_of(self, config: Mapping[str, Any]) -> "Places":
        """For the network that a diffusers config describes."""
        counts = (value for key, value in config.items() if key.endswith("layers") and isinstance(value, int))
        return self.places(max(counts))


@dataclass(frozen=True)
class Places:
    """Where parameters lie in an original file, by diffusers' names."""

    pieces: Mapping[str, Piece] = field(default_factory=dict)
    parts: Mapping[str, list[Share]] = field(default_factory=dict)
    """The shares of each fused tensor, in order."""

    def locate(self, name: str) -> list[Piece]:
        """In a file whose names begin with nothing; what no converter speaks of is called as diffusers calls it."""
        return [self.pieces.get(name) or Piece(name)]

    def slot(self, layer: str, width: int) -> Slot | None:
        """A layer's place in a kohya file; `width`: rows of the smallest part of a fused matrix, which is q's or as wide."""
        piece = self.pieces.get(f"{layer}.weight")
        if piece is None:
            return None
        name, parts = flat(piece.key.rpartition(".")[0]), self.parts.get(piece.key, [])
        if piece.share == WHOLE:
            return Slot(name, swapped=piece.swapped)
        smallest = min(number for _, number in parts)
        return Slot(name, parts.index(piece.share), tuple(int(width * number / smallest) for _, number in parts))


def spelled(header: Header, original: Original, otherwise: str) -> Spelled:
    """A transformer in a single file, in the original layout or diffusers'; `otherwise`: a tensor that tells where it lies in
    the latter."""
    part = next(filter(None, (find_part(header, mark) for mark in original.marks)), None)
    if part is None:
        part = find_part(header, otherwise) or Part(header, "")
        return Spelled(header, partial(locate, part, Places()))
    numbers = (int(found[1]) for key in header if key.startswith(part.prefix) and (found := _NUMBER.search(key)))
    places = original.places(1 + max(numbers, default=0))
    return Spelled(header, partial(locate, part, places))


def locate(part: Part, places: Places, name: str) -> list[Piece]:
    """Norms' factors are `scale` in the originals, in some of ComfyUI's files `weight`."""
    piece = places.pieces.get(name) or Piece(name)
    spellings = [piece.key, *([f"{piece.key.removesuffix('scale')}weight"] if piece.key.endswith(".scale") else [])]
    return [replace(piece, key=part.key(key)) for key in spellings]


# -- running a converter over names


@lru_cache(maxsize=64)
def _places(original: Original, blocks: int) -> Places:
    from diffusers.loaders import single_file_utils

    convert: Callable[[dict[str, Any]], dict[str, Any]] = getattr(single_file_utils, original.converter)
    names = [name.format(number) for name in original.names for number in range(blocks if "{}" in name else 1)]
    found = convert(_AnyTensor({name: _Rows(name) for name in names}))
    pieces = {name: rows.piece() for name, rows in found.items()}
    parts: dict[str, set[Share]] = {}
    for piece in pieces.values():
        parts.setdefault(piece.key, set()).add(piece.share)
    return Places(pieces, {key: sorted(shares) for key, shares in parts.items()})


class _AnyTensor(dict[str, Any]):
    """A checkpoint that has whatever is asked for."""

    def __missing__(self, key: str) -> Any:
        return _Rows(key)

    def pop(self, key: str, *default: Any) -> Any:
        return super().pop(key, None) or self[key]


class _Rows:
    """Stands for a tensor: the shares of another's rows that it consists of, in order. Knows what converters do with rows."""

    shape = (1,)  # SD3's asks, and does nothing with it

    def __init__(self, key: str, shares: Iterable[Share] = (WHOLE,)) -> None:
        self.key, self.shares = key, tuple(shares)

    def piece(self) -> Piece:
        (first, number), *rest = self.shares
        if not rest:
            return Piece(self.key, share=(first, number))
        assert self.shares == ((Fraction(1, 2),) * 2, (Fraction(0), Fraction(1, 2))), f"{self.key}: {self.shares}"
        return Piece(self.key, swapped=True)

    def split(self, sizes: Iterable[int], dim: int = 0) -> "list[_Rows]":
        ((first, number),), parts = self.shares, []
        sizes = list(sizes)
        for size in sizes:
            share = number * Fraction(size, sum(sizes))
            parts.append(_Rows(self.key, [(first, share)]))
            first += share
        return parts

    def chunk(self, chunks: int, dim: int = 0) -> "list[_Rows]":
        return self.split([1] * chunks)

    @staticmethod
    def cat(parts: "Iterable[_Rows]", dim: int = 0) -> "_Rows":
        parts = list(parts)
        return _Rows(parts[0].key, [share for part in parts for share in part.shares])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        assert func in (torch.cat, torch.chunk, torch.split), f"a converter calls {func.__name__}, which is not known here"
        return getattr(cls, func.__name__)(*args, **(kwargs or {}))
