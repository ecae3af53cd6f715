"""Which layers a file format can carry: asked of diffusers' own key conversion, so that nothing is guessed.

The kohya layout writes `.` as `_`, and readers guess the dots back. diffusers guesses wrong for some layers outside
the blocks (SDXL's `add_embedding`), whose weights it then drops with a warning. The diffusers layout keeps the dots.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .diffusers import unpack
from .fused import slots_of
from .kohya import module_name

if TYPE_CHECKING:
    from ..seam.family import Family


def reader_for(family: "Family") -> Any:
    """diffusers' pipeline loader for a family's LoRA."""
    loader = getattr(family, "lora_loader", None)
    if loader is None:  # UNets: by the parts that the LoRA may have
        xl = "text_encoder_2" in family.export_prefixes()
        loader = "StableDiffusionXLLoraLoaderMixin" if xl else "StableDiffusionLoraLoaderMixin"
    return getattr(diffusers.loaders, loader)


def unreadable(paths: Sequence[str], family: "Family", formats: Collection[str], config: Any) -> list[str]:
    """The `paths` that diffusers would not find again in a file of these formats; `config` is the UNet's."""
    if "kohya" not in formats or not paths:
        return []
    if (slots := slots_of(family)) is not None:
        return [path for path in paths if slots(path) is None]
    prefixes = family.export_prefixes()
    with unset_fake_temporarily(), torch.device("cpu"):
        one = torch.ones(1, 1)
        tensors = {
            f"{module_name(path, prefixes)}.{role}.weight": one for path in paths for role in ("lora_down", "lora_up")
        }
        state = _convert(reader_for(family), tensors, config)
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
