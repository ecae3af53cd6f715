"""Reading a PEFT folder: adapter_config.json and adapter_model.safetensors, as peft or this program wrote them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key
from torch import Tensor

from ..errors import SourceError, t
from .lora import Lora, LoraModule
from .read import read_tensors

LANGUAGE_PART = "language_model"
"""Of the trained model; files of PEFT are of language models only."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def read_peft_folder(folder: Path) -> Lora:
    """The modules of a folder that save_peft_folder or peft wrote, by their paths in our models. SourceError if damaged."""
    tensors, _ = read_tensors(folder / WEIGHTS, str(folder))
    config = _read_config(folder)
    _refuse_other_parts(folder, tensors, config)
    lora = {}
    for key in tensors:
        if not key.endswith(".lora_A.weight"):
            continue
        stem = key.removesuffix(".lora_A.weight")
        path = stem.removeprefix("base_model.model.")
        down, up = tensors[key].float(), tensors[f"{stem}.lora_B.weight"].float()
        magnitude = tensors.get(f"{stem}.lora_magnitude_vector")
        patterns = config.get("alpha_pattern") or {}  # peft's own reading: a regular expression, or the name's end
        alpha = patterns.get(get_pattern_key(list(patterns), path), config["lora_alpha"])
        scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
        lora[f"{LANGUAGE_PART}.{path}"] = LoraModule(down, up, scale, None if magnitude is None else magnitude.float())
    return lora


def _refuse_other_parts(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """What peft also keeps in such a folder and we do not train; left out unsaid, the model would not be the one saved."""
    kind = str(config.get("peft_type") or "LORA")
    known = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
    own = [key for key in tensors if ".base_layer." not in key]  # peft copies a frozen head or embedding along
    strange = sorted(key for key in own if not key.endswith(known))
    halves = [{key.removesuffix(end) for key in tensors if key.endswith(end)} for end in known[:2]]
    if kind != "LORA":
        problem = t(pt=f"a pasta tem um adaptador {kind}, não um LoRA", en=f"the folder holds a {kind} adapter, no LoRA")
    elif strange:
        few = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        problem = t(
            pt=f"além do LoRA, a pasta tem pesos que não treino aqui (modules_to_save, embeddings, bias): {few}",
            en=f"besides the LoRA, the folder holds weights not trained here (modules_to_save, embeddings, bias): {few}",
        )
    elif halves[0] != halves[1]:
        problem = t(
            pt=f"falta lora_A ou lora_B de {sorted(halves[0] ^ halves[1])[0]}",
            en=f"lora_A or lora_B of {sorted(halves[0] ^ halves[1])[0]} is missing",
        )
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
