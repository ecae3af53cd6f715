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

from . import table
from .lora import Lora, portable_path

METADATA_KEY = "lora_adapter_metadata"
_KEY = re.compile(
    r"(?P<path>.+?)[._](?:"
    r"(?P<down>lora_(?:A|down)(?:\.default)?\.weight|lora(?:_linear_layer)?\.down\.weight)|"
    r"(?P<up>lora_(?:B|up)(?:\.default)?\.weight|lora(?:_linear_layer)?\.up\.weight)|"
    r"(?P<magnitude>lora_magnitude_vector(?:\.default)?(?:\.weight)?)|(?P<alpha>alpha))"
)


def pack(lora: Lora) -> dict[str, Tensor]:
    packed = table.pack(lora, table.LAYOUTS["diffusers"], portable_path)
    return {_as_transformers_reads(key): tensor for key, tensor in packed.items()}


def _as_transformers_reads(key: str) -> str:
    """transformers 5 needs `.weight` to find a text encoder's magnitude; peft, which loads the UNet's, takes either spelling."""
    text = key.startswith("text_encoder") and key.endswith(".lora_magnitude_vector")
    return f"{key}.weight" if text else key


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

    def place(key: str) -> table.Place:
        match = _KEY.fullmatch(_plain(key))
        return table.Place(match["path"], by_name.get(_modern(match["path"])), match.lastgroup) if match else table.Place(key)

    found, strangers = table.gather(tensors, place)
    config = json.loads(metadata.get(METADATA_KEY, "{}"))
    return {path: table.lora_module(parts, _scale(path, parts, config)) for path, parts in found.items()}, strangers


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


def with_peft_config(metadata: Mapping[str, str], config: Path, paths: Iterable[str]) -> dict[str, str]:
    """What peft's own folders tell of alpha beside the file, said as diffusers' metadata says it."""
    if METADATA_KEY in metadata or not config.is_file():
        return dict(metadata)
    told = json.loads(config.read_text(encoding="utf-8"))
    parts = {path.partition(".")[0] for path in paths}
    return {**metadata, METADATA_KEY: json.dumps({f"{part}.{key}": told[key] for part in parts for key in told})}


def _scale(path: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> float:
    part, _, rest = path.partition(".")
    rank = len(parts["down"])
    alpha = float(config.get(f"{part}.lora_alpha") or rank)
    for pattern, value in (config.get(f"{part}.alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", rest) or re.match(rf"({pattern})$", path):
            alpha = float(value)
    alpha = float(parts["alpha"]) if "alpha" in parts else alpha
    return alpha / (rank**0.5 if config.get(f"{part}.use_rslora") else rank)
