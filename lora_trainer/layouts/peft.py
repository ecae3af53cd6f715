"""Reading a PEFT folder: adapter_config.json and adapter_model.safetensors, as peft or this program wrote them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key

from ..errors import SourceError, t
from . import table
from .lora import Lora
from .read import read_tensors

LANGUAGE_PART = "language_model"
"""Of the trained model; files of PEFT are of language models only."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def read_peft_folder(folder: Path) -> Lora:
    """The modules of a folder that save_peft_folder or peft wrote, by their paths in our models. SourceError if damaged."""
    stored, _ = read_tensors(folder / WEIGHTS, str(folder))
    config = _read_config(folder)
    own = {key: tensor.float() for key, tensor in stored.items() if ".base_layer." not in key}  # a copy of what is frozen
    strange = sorted(key for key in own if _place(key).path is None)
    found, strangers = table.gather(own, _place)
    _refuse_other_parts(folder, config, strange, [name for name in strangers if name not in strange])
    return {
        f"{LANGUAGE_PART}.{path}": table.lora_module(parts, strength(config, path, len(parts["down"])))
        for path, parts in found.items()
    }


def _place(key: str) -> table.Place:
    for factor, ending in table.LAYOUTS["peft"].endings.items():
        if key.endswith(f".{ending}"):
            return table.Place(key, key.removesuffix(f".{ending}").removeprefix("base_model.model."), factor)
    return table.Place(key)


def strength(config: Mapping[str, Any], path: str, rank: int) -> float:
    """The scale that peft reads out of its config: the first pattern counts that is the name or fits its end."""
    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), path), config["lora_alpha"])
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _refuse_other_parts(folder: Path, config: Mapping[str, Any], strange: Sequence[str], halves: Sequence[str]) -> None:
    """What peft also keeps in such a folder and we do not train; left out unsaid, the model would not be the one saved."""
    kind = str(config.get("peft_type") or "LORA")
    if kind != "LORA":
        problem = t(pt=f"a pasta tem um adaptador {kind}, não um LoRA", en=f"the folder holds a {kind} adapter, no LoRA")
    elif strange:
        few = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        problem = t(
            pt=f"além do LoRA, a pasta tem pesos que não treino aqui (modules_to_save, embeddings, bias): {few}",
            en=f"besides the LoRA, the folder holds weights not trained here (modules_to_save, embeddings, bias): {few}",
        )
    elif halves:
        name = f"base_model.model.{halves[0]}"
        problem = t(pt=f"falta lora_A ou lora_B de {name}", en=f"lora_A or lora_B of {name} is missing")
    else:
        return
    raise SourceError(
        problem, t(pt="use um LoRA só de camadas lineares", en="use a LoRA of linear layers only"), str(folder)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(
            t(pt=f"{CONFIG} falta ou está danificado ({error})", en=f"{CONFIG} is missing or damaged ({error})"),
            where=str(folder),
        ) from error
    return dict(config)
