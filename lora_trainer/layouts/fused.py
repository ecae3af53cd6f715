"""The kohya layout for models that the original keeps in fused matrices: FLUX's q, k and v (and MLP) are one LoRA.

Our modules are apart. Side by side they are one LoRA of the fused matrix: their `down` matrices stacked, their `up`
matrices on a block diagonal, zeros for a part that has none; diffusers' reader takes such a file apart again. kohya's own
trainers write one `down` for the whole; read here, each part gets that `down` and its rows of `up`. Left out: DoRA, whose
magnitude belongs to whole rows of the fused matrix.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..seam.slots import Slot, Slots, flat
from . import table
from .lora import Lora, LoraModule

_FACTORS = {"lora_down.weight": "down", "lora_up.weight": "up"}


def pack(lora: Lora, slots: Slots) -> dict[str, Tensor]:
    fused: Lora = {}
    for name, (rows, members) in _by_name(lora, slots).items():
        parts = {index: _ordered(lora[path], slots(path)) for index, path in members.items()}
        fused[name] = _fused(parts, rows) if rows else parts[0]
    return table.pack(fused, table.LAYOUTS["kohya"], str)


def _by_name(paths: Iterable[str], slots: Slots) -> dict[str, tuple[tuple[int, ...], dict[int, str]]]:
    """Name in the file -> rows of its parts, and the paths by part."""
    found: dict[str, tuple[tuple[int, ...], dict[int, str]]] = {}
    for path in paths:
        slot = slots(path)
        assert slot is not None, f"{path} has no place in a kohya file"
        found.setdefault(slot.name, (slot.rows, {}))[1][slot.index] = path
    return found


def _ordered(module: LoraModule, slot: Slot | None) -> LoraModule:
    """Between our order of rows and the file's, either way."""
    if slot is None or not slot.swapped:
        return module
    return replace(module, up=module.up.roll(len(module.up) // 2, 0))


def _fused(parts: Mapping[int, LoraModule], rows: tuple[int, ...]) -> LoraModule:
    rank = max(part.rank for part in parts.values())
    scale = next(iter(parts.values())).scale
    wide = next(iter(parts.values())).down.shape[1]
    down, up = torch.zeros(len(rows) * rank, wide), torch.zeros(sum(rows), len(rows) * rank)
    for index, part in parts.items():
        assert part.magnitude is None, "DoRA cannot be fused"
        fitted, first, column = part.with_scale(scale), sum(rows[:index]), index * rank
        down[column : column + part.rank] = fitted.down
        up[first : first + rows[index], column : column + part.rank] = fitted.up
    return LoraModule(down, up, scale)


def unpack(tensors: Mapping[str, Tensor], paths: Iterable[str], slots: Slots) -> tuple[Lora, list[str]]:
    """The modules among `paths`, and the file's names that belong to none of them.

    Files of trainers that take diffusers' modules (musubi-tuner's of Z-Image, OneTrainer's) spell those out, unfused.
    """
    paths = list(paths)
    usual = _by_name(paths, slots)
    unfused = {flat(path.partition(".")[2]): ((), {0: path}) for path in paths}
    places = unfused | usual

    def place(key: str) -> table.Place:
        name, _, ending = key.partition(".")
        return table.Place(name, name if name in places else None, _FACTORS.get(ending, ending))

    found, strangers = table.gather(tensors, place)
    lora: Lora = {}
    for name, factors in found.items():
        rows, members = places[name]
        for index, part in enumerate(split(table.lora_module(factors), rows)):
            if index in members:
                path = members[index]
                lora[path] = _ordered(part, slots(path) if name in usual else None)
            elif bool(part.up.any()):
                strangers.append(f"{name} [{index}]")
    return lora, strangers


_COMFYUI = re.compile(
    r"(?:base_model\.model\.)?(?:diffusion_model\.)?(?P<name>.+)\."
    r"(?:(?P<down>lora_A|lora_down)|(?P<up>lora_B|lora_up)|alpha)(?:\.default)?(?:\.weight)?"
)
OTHER_PREFIXES = ("lycoris_", "lora_transformer_")
"""SimpleTuner's and OneTrainer's, for what is `lora_unet_` in kohya files."""


def respelled(tensors: Mapping[str, Tensor], paths: Iterable[str], slots: Slots) -> dict[str, Tensor]:
    """A file with the original's names in ComfyUI's spelling, `diffusion_model.….qkv.lora_A.weight` (or without the first
    word, as Black Forest Labs'), in kohya's; and one of other trainers' flattened names. Others as they are. Some layers are
    called the same in the original and in diffusers: one that is not tells."""
    paths = list(paths)
    tensors = {_with_kohyas_prefix(key): tensor for key, tensor in tensors.items()}
    ours, theirs = {path.partition(".")[2] for path in paths}, _by_name((path for path in paths if slots(path)), slots)
    found = {key: match for key in tensors if (match := _COMFYUI.fullmatch(key))}
    names = {key: flat(match["name"]) for key, match in found.items()}
    if not any(names[key] in theirs and match["name"] not in ours for key, match in found.items()):
        return tensors

    def spelled(key: str, match: re.Match[str]) -> str:
        return f"{names[key]}.{'lora_down.weight' if match['down'] else 'lora_up.weight' if match['up'] else 'alpha'}"

    return {spelled(key, found[key]) if key in found else key: tensor for key, tensor in tensors.items()}


def _with_kohyas_prefix(key: str) -> str:
    prefix = next((prefix for prefix in OTHER_PREFIXES if key.startswith(prefix)), None)
    return f"lora_unet_{key.removeprefix(prefix)}" if prefix else key


def split(whole: LoraModule, rows: tuple[int, ...]) -> list[LoraModule]:
    """The parts of a LoRA of a fused matrix: each of its own rank where they lie on a block diagonal, else with all of `down`."""
    if not rows:
        return [whole]
    assert sum(rows) == len(whole.up), f"{tuple(whole.up.shape)} is not {rows}"
    ups = whole.up.split(rows)
    rank, rest = divmod(whole.rank, len(rows))
    columns = [slice(index * rank, (index + 1) * rank) for index in range(len(rows))]
    apart = not rest and all(
        not bool(up[:, other].any()) for index, up in enumerate(ups) for other in columns[:index] + columns[index + 1 :]
    )
    if not apart:
        return [LoraModule(whole.down, up, whole.scale) for up in ups]
    return [LoraModule(whole.down[at], up[:, at], whole.scale) for up, at in zip(ups, columns, strict=True)]
