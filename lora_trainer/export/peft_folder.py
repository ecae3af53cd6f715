"""A PEFT folder: what transformers, vLLM and peft load a language LoRA from, and proof that peft does.

adapter_config.json names the base as it can be found again (the Hugging Face id, else the path that was trained on) and
gives each module's true strength as alpha / rank, whatever rule made it. Layers are named by their last part where that
means the very same layers, as people write it by hand. Left out: other adapter types that peft knows.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
from torch import Tensor, nn

from ..engine.tracker import host_memory
from ..errors import t
from ..layouts.lora import Lora
from ..layouts.peft import CONFIG, WEIGHTS, read_peft_folder
from ..layouts.peft import LANGUAGE_PART as PART
from ..layouts.read import read_tensors
from ._folders import Entry, new_folder, write_tensors, write_text
from .proof import (
    FILE_TOLERANCE,
    OUTPUT_TOLERANCE,
    Verification,
    check_consumer,
    delta_difference,
    lifted_out,
    quiet_probe,
    relative,
    require,
    rounded,
)
from .write import DTYPES, Precision, _needs_balance, _refuse_non_finite, cast

if TYPE_CHECKING:
    from ..adapters import Adapter
    from ..families.causal_lm.family import CausalLM



def save_peft_folder(
    model: nn.ModuleDict,
    adapter: "Adapter",
    family: "CausalLM",
    folder: Path,
    precision: Precision,
    facts: Mapping[str, str],
) -> Path:
    """Write `folder` whole; `facts` go into the model card, one line each. DivergedError if a value is not finite."""
    lora = {path.removeprefix(f"{PART}."): module for path, module in adapter.export().items()}
    _refuse_non_finite({name: module.tensors for name, module in lora.items()}, folder)
    if precision == "fp16":
        lora = {name: m.balanced() if _needs_balance(m.down) or _needs_balance(m.up) else m for name, m in lora.items()}
    tensors = cast(_keyed(lora), DTYPES[precision], folder)
    entries = [Entry(key, tuple(x.shape), x.dtype, lambda x=x: x) for key, x in sorted(tensors.items())]  # type: ignore[misc]
    config = peft_config(model[PART], lora, base_name(family))
    with new_folder(folder, sum(entry.nbytes for entry in entries)) as place:
        write_tensors(place / WEIGHTS, entries)
        write_text(place / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_text(place / "README.md", model_card(config, facts))
    return folder


def base_name(family: "CausalLM") -> str:
    """Where a reader finds the base."""
    return family.source.hub_id or str(family.source.path.resolve())


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


def _keyed(lora: Lora) -> dict[str, Tensor]:
    tensors = {}
    for path, module in lora.items():
        stem = f"base_model.model.{path}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = module.down, module.up
        if module.magnitude is not None:
            tensors[f"{stem}.lora_magnitude_vector"] = module.magnitude
    return tensors


def verify_peft_folder(
    model: nn.ModuleDict, adapter: "Adapter", folder: Path, forward: Callable[[nn.ModuleDict], Tensor]
) -> Verification:
    """Proof by peft's own loader, on the very model that was trained; model, adapter and random state stay as they were.

    Adapters on single experts are only read back: peft wants the experts fused, as they are in transformers' model.
    """
    with host_memory():
        live, stored = adapter.export(), read_peft_folder(folder)
        require(stored.keys() == live.keys(), folder, f"{len(stored)} / {len(live)}")
        difference = max(delta_difference(stored[name], live[name]) for name in live)
        dtype = next(iter(_dtypes(folder)))
    require(difference <= FILE_TOLERANCE[dtype], folder, f"delta W: {difference:.2e}")
    if any(".experts." in path for path in live):
        return Verification(folder, len(live), difference, 0.0, 0.0, t(pt="releitura própria", en="our own reader"))
    with torch.no_grad(), torch.random.fork_rng(devices=[]), quiet_probe(model, adapter):
        with adapter.disabled():
            base = forward(model).float()
        with lifted_out(model, adapter):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in its older words
                peft.PeftModel.from_pretrained(model[PART], str(folder), low_cpu_mem_usage=False)
            loaded = check_consumer(model, stored, folder)
            raw = forward(model)
        with rounded(adapter, stored, loaded):
            reference = forward(model).float()
    output, effect = relative(raw.float(), reference), relative(raw.float(), base)
    tolerance = max(OUTPUT_TOLERANCE[loaded], OUTPUT_TOLERANCE[raw.dtype])
    require(output <= tolerance, folder, f"output: {output:.2e}")
    require(effect > 0 or torch.equal(reference, base), folder, "no effect")
    return Verification(folder, len(live), difference, output, effect, f"peft {peft.__version__}")


def _dtypes(folder: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in read_tensors(folder / WEIGHTS, str(folder))[0].values()}
