"""Which examples share a row, as a pure function of (lengths, seed, epoch).

Packing is best-fit decreasing over the whole set: each example goes into the fullest row that still takes it, the
longest first. Lengths are first rounded up by at most 3 %, so that examples of like length trade places from epoch to
epoch while the number of rows stays the same in all of them. Grouping puts examples of like length, unpacked, into one
window, drawn from chunks of the shuffled set.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from ..data.variants import stable_hash

_CHUNK_WINDOWS = 16
"""Windows whose examples are sorted by length together: enough to save most padding, few enough to keep the shuffle."""


def plan_packs(
    lengths: Sequence[int], max_length: int, seed: int, epoch: int, uids: Sequence[object] | None = None
) -> list[list[int]]:
    """Rows of indices into `lengths`; every index once, no row longer than `max_length`."""
    keys = [stable_hash("pack", seed, epoch, uid) for uid in (uids or range(len(lengths)))]
    sizes = [min(rounded(length), max_length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-sizes[i], keys[i]))
    smallest = sizes[order[-1]] if order else 0
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []
    for index in order:
        place = bisect_left(open_packs, (sizes[index], -1))
        if place < len(open_packs):
            space, pack = open_packs.pop(place)
            packs[pack].append(index)
        else:
            space, pack = max_length, len(packs)
            packs.append([index])
        if space - sizes[index] >= smallest:
            insort(open_packs, (space - sizes[index], pack))
    for pack_indices in packs:
        pack_indices.sort(key=keys.__getitem__)
    return sorted(packs, key=lambda pack: stable_hash("row", *(keys[i] for i in pack)))


def rounded(length: int) -> int:
    step = max(1, length // 32)
    return -(-length // step) * step


def plan_groups(
    lengths: Sequence[int], window: int, seed: int, epoch: int, uids: Sequence[object] | None = None
) -> list[list[int]]:
    """Windows of `window` indices (the last may be shorter), alike in length inside; depends on `window` alone, not on
    how it is divided into micro-batches."""
    keys = [stable_hash("group", seed, epoch, uid) for uid in (uids or range(len(lengths)))]
    order = sorted(range(len(lengths)), key=keys.__getitem__)
    windows: list[list[int]] = []
    chunk = window * _CHUNK_WINDOWS
    for start in range(0, len(order), chunk):
        alike = sorted(order[start : start + chunk], key=lambda i: (-lengths[i], keys[i]))
        windows += [alike[cut : cut + window] for cut in range(0, len(alike), window)]
    full = [w for w in windows if len(w) == window]
    full.sort(key=lambda w: stable_hash("window", *(keys[i] for i in w)))
    return full + [w for w in windows if len(w) < window]
