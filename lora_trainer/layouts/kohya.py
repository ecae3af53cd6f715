"""The kohya layout: `lora_unet_….lora_down.weight`, `.lora_up.weight`, `.alpha`. A1111, Forge, ComfyUI and diffusers
read it.

UNet modules keep their diffusers names, which all these readers accept; each module has its own alpha, and readers
apply alpha / rank. DoRA adds `.dora_scale`, (out, 1) or (out, 1, 1, 1): the norms of the output rows, as LyCORIS
writes them with `wd_on_output`. diffusers 0.42 drops that tensor, A1111 expects norms of input columns, and ComfyUI
divides by the norm of the base weight instead of the merged one: for DoRA no reading is common to all, and the
diffusers layout is the exact one.

Left out: writing SGM names (`input_blocks_4_1_…`). They are read, since sd-scripts trains SDXL under them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..bases.single_file import original_unet_names
from . import table
from .lora import Lora, portable_path

LAYOUT = table.LAYOUTS["kohya"]
_FACTORS = {ending: factor for factor, ending in LAYOUT.endings.items()} | {"alpha": "alpha"}
_ATTENTION = re.compile(r"\.attn\d\.to_(q|k|v|out\.0)$")


def module_name(path: str, prefixes: Mapping[str, str]) -> str:
    """`unet.mid_block.attentions.0…` -> `lora_unet_mid_block_attentions_0…`."""
    part, _, rest = portable_path(path).partition(".")
    return f"{prefixes[part]}_{rest.replace('.', '_')}"


def original_names(path: str, prefixes: Mapping[str, str], layers_per_block: int) -> list[str]:
    """`unet.down_blocks.1.attentions.0…` -> `lora_unet_input_blocks_4_1_…`, as sd-scripts trains SDXL."""
    part, _, rest = path.partition(".")
    names = original_unet_names(f"{rest}.weight", layers_per_block) if part == "unet" else []
    return [f"{prefixes[part]}_{name.removesuffix('.weight').replace('.', '_')}" for name in names]


def pack(lora: Lora, prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    return table.pack(_with_readable_alphas(lora), LAYOUT, lambda path: module_name(path, prefixes))


def unpack(
    tensors: Mapping[str, Tensor], paths: Iterable[str], prefixes: Mapping[str, str], layers_per_block: int = 2
) -> tuple[Lora, list[str]]:
    """The modules among `paths`, and the file's names that belong to none of them."""
    by_name = {
        name: path
        for path in paths
        for name in (module_name(path, prefixes), *original_names(path, prefixes, layers_per_block))
    }

    def place(key: str) -> table.Place:
        name, _, ending = key.partition(".")
        return table.Place(name if ending in _FACTORS else key, by_name.get(name), _FACTORS.get(ending))

    found, strangers = table.gather(tensors, place)
    return {path: table.lora_module(parts) for path, parts in found.items()}, strangers


def _with_readable_alphas(lora: Lora) -> Lora:
    """diffusers gives a part's commonest alpha to all its attention layers, since its alpha patterns miss them.

    Where another alpha is commoner than the attention layers' own, the latter is given to the whole part.
    """
    result = dict(lora)
    for part in {path.partition(".")[0] for path in lora}:
        members = {path: module for path, module in lora.items() if path.startswith(f"{part}.")}
        common = Counter(module.alpha for module in members.values()).most_common(1)[0][0]
        attention = {module.alpha for path, module in members.items() if _ATTENTION.search(path)}
        if attention - {common}:
            alpha = sorted(attention)[0]
            result.update({path: module.with_scale(alpha / module.rank) for path, module in members.items()})
    return result
