"""A PEFT folder: what transformers, vLLM and peft load a language LoRA from, and proof that peft does.

adapter_config.json names the base as it can be found again (the Hugging Face id, else the path that was trained on) and
gives each module's true strength as alpha / rank, whatever rule made it. Layers are named by their last part where that
means the very same layers, as people write it by hand. Left out: other adapter types that peft knows.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
from torch import nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import t
from ..families.causal_lm.family import CausalLM
from ..layouts import table
from ..layouts.lora import Lora
from ..layouts.peft import CONFIG, WEIGHTS
from ..layouts.peft import LANGUAGE_PART as PART
from ._folders import Entry, new_folder, write_tensors, write_text
from .proof import Forward, Loaded, Verification, check_consumer, prove, read_back
from .write import DTYPES, Precision, cast, prepared


def save_peft_folder(
    model: nn.ModuleDict,
    adapter: Adapter,
    family: CausalLM,
    folder: Path,
    precision: Precision,
    facts: Mapping[str, str],
) -> Path:
    """Write `folder` whole; `facts` go into the model card, one line each. DivergedError if a value is not finite."""
    lora = {path.removeprefix(f"{PART}."): module for path, module in prepared(adapter.export(), precision, folder).items()}
    packed = table.pack(lora, table.LAYOUTS["peft"], lambda path: f"base_model.model.{path}")
    tensors = cast(packed, DTYPES[precision], folder)
    entries = [Entry(key, tuple(x.shape), x.dtype, lambda x=x: x) for key, x in sorted(tensors.items())]  # type: ignore[misc]
    config = peft_config(model[PART], lora, family.source.hub_id or str(family.source.path.resolve()))
    with new_folder(folder, sum(entry.nbytes for entry in entries)) as place:
        write_tensors(place / WEIGHTS, entries)
        write_text(place / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_text(place / "README.md", model_card(config, facts))
    return folder


def peft_config(model: nn.Module, lora: Lora, base: str) -> dict[str, Any]:
    """adapter_config.json. Ranks and alphas that are not the commonest are given by module."""
    ranks, alphas = ({path: get(m) for path, m in lora.items()} for get in (lambda m: m.rank, lambda m: m.alpha))
    rank, alpha = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        r=rank,
        lora_alpha=alpha,
        rank_pattern={f"^{re.escape(path)}": each for path, each in ranks.items() if each != rank},
        alpha_pattern={f"^{re.escape(path)}": each for path, each in alphas.items() if each != alpha},
        use_dora=any(module.magnitude is not None for module in lora.values()),
        target_modules=target_modules(model, list(lora)),
    ).to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


def target_modules(model: nn.Module, paths: list[str]) -> list[str]:
    """Last parts of the names (q_proj, …) if no other layer shares them, else whole paths."""
    leaves = {path.rpartition(".")[2] for path in paths}
    bare = {name.removesuffix(".base_layer") for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    named = {name for name in bare if name.rpartition(".")[2] in leaves}
    return sorted(leaves) if named == set(paths) else sorted(paths)


def model_card(config: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    base = config["base_model_name_or_path"]
    front = {"base_model": base, "library_name": "peft", "pipeline_tag": "text-generation", "tags": ["lora"]}
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""]
    lines += [f"# {facts.get('name', 'LoRA')}", ""]
    rank, alpha = config["r"], config["lora_alpha"]
    lines += [
        t(
            pt=f"LoRA (rank {rank}, alfa {alpha:g}) para `{base}`. Para usar:",
            en=f"LoRA (rank {rank}, alpha {alpha:g}) for `{base}`. To use it:",
        ),
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({base!r})",
        f"model = PeftModel.from_pretrained(base, {t(pt='esta-pasta', en='this-folder')!r})",
        "```",
        "",
        *(f"- {key}: {value}" for key, value in facts.items() if key != "name"),
        "",
    ]
    return "\n".join(lines)


def verify_peft_folder(model: nn.ModuleDict, adapter: Adapter, folder: Path, forward: Forward) -> Verification:
    """Proof by peft's own loader, on the very model that was trained; model, adapter and random state stay as they were.

    Adapters on single experts are only read back: peft wants the experts fused, as they are in transformers' model.
    """
    if any(".experts." in path for path in adapter.layers):
        with host_memory():
            modules, difference = read_back(adapter, folder)
        return Verification(folder, len(modules), difference, 0.0, 0.0, t(pt="releitura própria", en="our own reader"))
    return prove(model, adapter, folder, partial(_by_peft, folder), forward)


def _by_peft(folder: Path, modules: Any, model: nn.ModuleDict) -> Loaded:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in its older words
        peft.PeftModel.from_pretrained(model[PART], str(folder), low_cpu_mem_usage=False)
    return Loaded(f"peft {peft.__version__}", check_consumer(model, modules, folder))
