"""The diffusers layout: `unet.….lora_A.weight`, `lora_B.weight`, with alpha / rank folded into lora_B.

Folded, because a reader without our config then takes alpha = rank, which is right in every reader: diffusers without
`lora_adapter_metadata`, ComfyUI's transformer families (which ignore that metadata), peft. The metadata is added only
where ranks differ between modules, for diffusers before its PR 14409, which took the first module's rank as
everybody's alpha. DoRA adds `lora_magnitude_vector`, exact in diffusers.

Left out: the full LoraConfig as metadata. One key that the reader's peft does not know stops the whole file from
loading.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .lora import Lora, LoraModule, portable_path

METADATA_KEY = "lora_adapter_metadata"
_KEY = re.compile(
    r"(?P<path>.+?)[._](?:"
    r"(?P<down>lora_(?:A|down)(?:\.default)?\.weight|lora(?:_linear_layer)?\.down\.weight)|"
    r"(?P<up>lora_(?:B|up)(?:\.default)?\.weight|lora(?:_linear_layer)?\.up\.weight)|"
    r"(?P<magnitude>lora_magnitude_vector(?:\.default)?(?:\.weight)?)|(?P<alpha>alpha))"
)


def pack(lora: Lora, prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, module in folded(lora).items():
        name = portable_path(path)
        tensors[f"{name}.lora_A.weight"] = module.down
        tensors[f"{name}.lora_B.weight"] = module.up
        if module.magnitude is not None:
            shape = (1, -1, 1, 1) if module.down.ndim == 4 else (-1,)
            # transformers 5 needs `.weight` to find a magnitude; peft, which loads the UNet's, takes either spelling
            suffix = ".weight" if name.startswith("text_encoder") else ""
            tensors[f"{name}.lora_magnitude_vector{suffix}"] = module.magnitude.reshape(shape)
    return tensors


def folded(lora: Lora) -> Lora:
    return {path: module.with_scale(1.0) for path, module in lora.items()}


def adapter_metadata(lora: Lora) -> dict[str, str]:
    """Empty when all modules of each part have one rank: readers then need nothing but the tensors."""
    entries: dict[str, Any] = {}
    for part in sorted({path.partition(".")[0] for path in lora}):
        ranks = {path.partition(".")[2]: m.rank for path, m in lora.items() if path.startswith(f"{part}.")}
        common = Counter(ranks.values()).most_common(1)[0][0]
        pattern = {f"^{re.escape(path)}": rank for path, rank in sorted(ranks.items()) if rank != common}
        own = {"r": common, "lora_alpha": common, "target_modules": sorted(ranks)}
        if pattern:
            own |= {"rank_pattern": pattern, "alpha_pattern": pattern}
        if any(m.magnitude is not None for path, m in lora.items() if path.startswith(f"{part}.")):
            own["use_dora"] = True
        entries |= {f"{part}.{key}": value for key, value in own.items()}
    if not any(key.endswith(".rank_pattern") for key in entries):
        return {}
    return {METADATA_KEY: json.dumps(entries, sort_keys=True)}


def unpack(tensors: Mapping[str, Tensor], paths: Iterable[str], metadata: Mapping[str, str]) -> tuple[Lora, list[str]]:
    """The modules among `paths`, and the file's names that belong to none of them. Old diffusers spellings too, and without
    the part's name, as peft and DiffSynth save the one model they know."""
    by_name = {spelling: path for path in paths for spelling in (path, portable_path(path), _bare(path))}
    found: dict[str, dict[str, Tensor]] = {}
    strangers = set()
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(_plain(key))
        path = by_name.get(_modern(match["path"])) if match else None
        if match and path and match.lastgroup:
            found.setdefault(path, {})[match.lastgroup] = tensor
        else:
            strangers.add(match["path"] if match else key)
    complete = {path: parts for path, parts in found.items() if {"down", "up"} <= parts.keys()}
    strangers.update(found.keys() - complete.keys())
    config = _read_config(metadata)
    return {path: _module(path, parts, config) for path, parts in complete.items()}, sorted(strangers)


def _plain(key: str) -> str:
    """Without what peft puts before it, and with diffusers' word for ComfyUI's (ai-toolkit's `diffusion_model.`)."""
    key = key.removeprefix("base_model.model.")
    return f"transformer.{key.removeprefix('diffusion_model.')}" if key.startswith("diffusion_model.") else key


def _bare(path: str) -> str:
    part, _, rest = path.partition(".")
    return rest if part in ("unet", "transformer") else path


def _modern(path: str) -> str:
    """`attn1.processor.to_out` -> `attn1.to_out.0`; `self_attn.to_q` -> `self_attn.q_proj`."""
    if ".processor." in path:
        path = path.replace(".processor.", ".")
        return f"{path}.0" if path.endswith(".to_out") else path
    return re.sub(r"\.self_attn\.to_(q|k|v|out)$", r".self_attn.\1_proj", path)


def _read_config(metadata: Mapping[str, str]) -> dict[str, Any]:
    return json.loads(metadata[METADATA_KEY]) if METADATA_KEY in metadata else {}


def with_peft_config(metadata: Mapping[str, str], config: Path, paths: Iterable[str]) -> dict[str, str]:
    """What peft's own folders tell of alpha beside the file, said as diffusers' metadata says it."""
    if METADATA_KEY in metadata or not config.is_file():
        return dict(metadata)
    told = json.loads(config.read_text(encoding="utf-8"))
    parts = {path.partition(".")[0] for path in paths}
    return {**metadata, METADATA_KEY: json.dumps({f"{part}.{key}": told[key] for part in parts for key in told})}


def _module(path: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> LoraModule:
    part, _, rest = path.partition(".")
    rank = int(parts["down"].shape[0])
    alpha = float(config.get(f"{part}.lora_alpha") or rank)
    for pattern, value in (config.get(f"{part}.alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", rest) or re.match(rf"({pattern})$", path):
            alpha = float(value)
    if "alpha" in parts:
        alpha = float(parts["alpha"])
    scale = alpha / (rank**0.5 if config.get(f"{part}.use_rslora") else rank)
    magnitude = parts["magnitude"].flatten() if "magnitude" in parts else None
    return LoraModule(parts["down"], parts["up"], scale, magnitude)
