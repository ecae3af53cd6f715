"""Files of a LoHa or LoKr, as LyCORIS names and flattens them.

A kohya file calls modules as kohya does in UNets and text encoders (A1111, Forge and ComfyUI read it) and `lycoris_…` with
diffusers' module names in transformers, where ComfyUI and Forge know the place of each part of a fused matrix. A diffusers
file has the module paths themselves, the scale folded in; ComfyUI reads it too, and diffusers the LoKr of its newest
families. Other programs' names for the same modules are read.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from . import kohya, table
from .lora import portable_path
from .lycoris import FACTORS, Lycoris, LycorisModule
from .read import LoraFile, damaged, read_as_float32, refuse_other_forms

TRANSFORMER = "lycoris"
"""Prefix of a transformer's modules in kohya files."""


def pack(lycoris: Lycoris, prefixes: Mapping[str, str], layout: str) -> dict[str, Tensor]:
    spell = portable_path if layout == "diffusers" else lambda path: kohya_name(path, prefixes)
    return table.pack(lycoris, table.LAYOUTS[layout], spell)


def kohya_name(path: str, prefixes: Mapping[str, str]) -> str:
    return kohya.module_name(path, {**prefixes, "transformer": TRANSFORMER})


def read_lycoris(
    path: Path, paths: list[str], prefixes: Mapping[str, str], layers_per_block: int = 2, kind: str = "loha"
) -> LoraFile[LycorisModule]:
    """A file of this kind, in float32. `paths`: the module paths the model can take; `prefixes`: part -> kohya prefix."""
    tensors, metadata = read_as_float32(path, lambda stored: refuse_other_forms(stored, kind, path))
    spelled = {name: each for each in paths for name in _spellings(each, prefixes, layers_per_block)}

    def place(key: str) -> table.Place:
        name, _, factor = key.rpartition(".")
        return table.Place(name or key, spelled.get(name), factor if factor in (*FACTORS[kind], "alpha") else None)

    found, strangers = table.gather(tensors, place, needed=())
    try:
        modules = {place: _module(parts, kind) for place, parts in found.items() if parts.keys() - {"alpha"}}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise damaged(path, error) from error  # tensors that are not what their names say
    return LoraFile(modules, strangers, metadata)


def _spellings(path: str, prefixes: Mapping[str, str], layers_per_block: int) -> list[str]:
    part, _, rest = path.partition(".")
    own = [path, portable_path(path), kohya_name(path, prefixes), kohya.module_name(path, prefixes)]
    own += kohya.original_names(path, prefixes, layers_per_block)
    if part not in ("unet", "transformer"):
        return own
    flat = rest.replace(".", "_")
    bare = [rest, f"diffusion_model.{rest}", f"base_model.model.{rest}"]  # as ai-toolkit and peft save the one model they know
    return [*own, *bare, f"lycoris_{flat}", f"lycoris_{part}_{flat}", f"lora_{part}_{flat}"]


def _module(parts: Mapping[str, Tensor], kind: str) -> LycorisModule:
    factors = {role: parts[role] for role in FACTORS[kind] if role in parts}
    low = next((factors[name] for name in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b") if name in factors), None)
    alpha = float(parts["alpha"]) if "alpha" in parts else None
    if low is None:
        return LycorisModule(factors, 1.0, max(1, round(alpha or 1)))
    return LycorisModule(factors, 1.0 if alpha is None else alpha / len(low), len(low))
