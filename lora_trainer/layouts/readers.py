"""Which loader of diffusers reads a family's files, and which layers a file can carry: asked of diffusers, nothing guessed.

The loader is that of the pipeline that the user's base names in its model_index.json, else of the family's usual one; a
pipeline may have none. The kohya layout writes `.` as `_`, and readers guess the dots back. diffusers guesses wrong for some
layers outside the blocks (SDXL's `add_embedding`), whose weights it then drops with a warning. The diffusers layout keeps
the dots.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import diffusers
import torch
from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.utils import logging as diffusers_logging
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..seam.family import Family
from ..seam.readers import DIFFUSERS
from .diffusers import unpack
from .kohya import module_name


def pipeline_for(family: Family) -> Any:
    """diffusers' class that the user's base is for."""
    own = (family.source.config("model_index") or {}).get("_class_name")
    found = (getattr(diffusers, str(name), None) for name in (own, family.pipeline))
    return next(each for each in found if _is_pipeline(each))


def _is_pipeline(found: Any) -> bool:
    """One that says which model it is for; not every name in a file is diffusers'."""
    base = diffusers.DiffusionPipeline
    return isinstance(found, type) and issubclass(found, base) and found is not base


def loader_for(family: Family) -> Any:
    """The part of that pipeline that loads LoRA files; None where it has none."""
    loaders = [base for base in pipeline_for(family).__mro__ if base.__module__.startswith("diffusers.loaders.")]
    return next((loader for loader in loaders if issubclass(loader, LoraBaseMixin) and loader is not LoraBaseMixin), None)


def proves(family: Family, layout: str, kind: str) -> bool:
    """Whether diffusers' loader, if there is one, makes of a file of this layout and kind what was trained."""
    kinds = family.loader_kinds if layout == DIFFUSERS else ("lora",)
    return DIFFUSERS in family.formats[layout] and kind in kinds


def programs(family: Family, layout: str, kind: str) -> list[str]:
    """Who reads a file of this layout and kind."""
    return [name for name in family.formats[layout] if name != DIFFUSERS or proves(family, layout, kind)]


def unreadable(paths: Sequence[str], family: Family, formats: Collection[str], config: Any) -> list[str]:
    """The `paths` that diffusers would not find again in a file of these formats; `config` is the UNet's."""
    if "kohya" not in formats or not paths:
        return []
    if family.kohya_slots is not None:
        return [path for path in paths if family.kohya_slots(path) is None]
    loader, prefixes = loader_for(family), family.export_prefixes()
    if loader is None:
        return []
    with unset_fake_temporarily(), torch.device("cpu"):
        one = torch.ones(1, 1)
        tensors = {
            f"{module_name(path, prefixes)}.{role}.weight": one for path in paths for role in ("lora_down", "lora_up")
        }
        state = _convert(loader, tensors, config)
    found, _ = unpack(state, paths, {})
    count = Counter(module_name(path, prefixes) for path in paths)
    return [path for path in paths if path not in found or count[module_name(path, prefixes)] > 1]


def _convert(reader: Any, tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        state, _alphas = reader.lora_state_dict(tensors, unet_config=config)
    finally:
        diffusers_logging.set_verbosity(level)
    return dict(state)
