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

from . import table
from .lora import Lora, portable_path

LAYOUT = table.LAYOUTS["kohya"]
_FACTORS = {ending: factor for factor, ending in LAYOUT.endings.items()} | {"alpha": "alpha"}
_ATTENTION = re.compile(r"\.attn\d\.to_(q|k|v|out\.0)$")
_RESNET_PARTS = {
    "in_layers_2": "conv1",
    "out_layers_3": "conv2",
    "emb_layers_1": "time_emb_proj",
    "skip_connection": "conv_shortcut",
}
_OUTSIDE_BLOCKS = {
    "input_blocks_0_0": "conv_in",
    "out_2": "conv_out",
    "time_embed_0": "time_embedding_linear_1",
    "time_embed_2": "time_embedding_linear_2",
    "label_emb_0_0": "add_embedding_linear_1",
    "label_emb_0_2": "add_embedding_linear_2",
}


def module_name(path: str, prefixes: Mapping[str, str]) -> str:
    """`unet.mid_block.attentions.0…` -> `lora_unet_mid_block_attentions_0…`."""
    part, _, rest = portable_path(path).partition(".")
    return f"{prefixes[part]}_{rest.replace('.', '_')}"


def pack(lora: Lora, prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    return table.pack(_with_readable_alphas(lora), LAYOUT, lambda path: module_name(path, prefixes))


def unpack(
    tensors: Mapping[str, Tensor], paths: Iterable[str], prefixes: Mapping[str, str], layers_per_block: int = 2
) -> tuple[Lora, list[str]]:
    """The modules among `paths`, and the file's names that belong to none of them."""
    by_name = {module_name(path, prefixes): path for path in paths}

    def place(key: str) -> table.Place:
        name, _, ending = key.partition(".")
        path = by_name.get(name) or by_name.get(diffusers_name(name, layers_per_block))
        return table.Place(name if ending in _FACTORS else key, path, _FACTORS.get(ending))

    found, strangers = table.gather(tensors, place)
    return {path: table.lora_module(parts) for path, parts in found.items()}, strangers


def diffusers_name(name: str, layers_per_block: int) -> str:
    """`lora_unet_input_blocks_4_1_…` (the original UNet's names) -> `lora_unet_down_blocks_1_attentions_0_…`."""
    prefix, body = name[: len("lora_unet_")], name[len("lora_unet_") :]
    if prefix != "lora_unet_":
        return name
    if body in _OUTSIDE_BLOCKS:
        return prefix + _OUTSIDE_BLOCKS[body]
    if middle := re.fullmatch(r"middle_block_(\d)_(.+)", body):
        kind = {"0": "resnets_0", "1": "attentions_0", "2": "resnets_1"}.get(middle[1], "")
        return f"{prefix}mid_block_{kind}_{_RESNET_PARTS.get(middle[2], middle[2])}"
    if not (block := re.fullmatch(r"(input|output)_blocks_(\d+)_(\d)_(.+)", body)):
        return name
    side, index, inner, rest = "down" if block[1] == "input" else "up", int(block[2]), block[3], block[4]
    stage, layer = divmod(index - 1 if side == "down" else index, layers_per_block + 1)
    if rest in ("op", "conv"):
        return f"{prefix}{side}_blocks_{stage}_{side}samplers_0_conv"
    kind = "resnets" if inner == "0" else "attentions"
    return f"{prefix}{side}_blocks_{stage}_{kind}_{layer}_{_RESNET_PARTS.get(rest, rest)}"


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
