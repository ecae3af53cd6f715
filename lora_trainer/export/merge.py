"""The base with the LoRA added to its weights: a model folder like the base's own, written shard by shard.

Tensors are read, changed and written one at a time under the names of the base's files, so RAM holds one tensor whatever
the model's size, and readers that know the base know the result. Sums are float32, rounded once. A LoRA trained on a
quantised base has learnt to live with its errors, which the 16-bit base has not: `measure_drift` tells by how much the
merged model answers differently from what was trained.

Left out: adapters on tensors that transformers builds from several of the file's.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.schema import ModelConfig
from ..engine.tracker import host_memory
from ..errors import SourceError, t
from ..families.causal_lm.attention import texts_of
from ..families.causal_lm.base import Stored
from ..families.causal_lm.family import CausalLM
from ..families.causal_lm.loss import find_targets
from ..files.sources import open_source
from ..layouts.lora import Lora, LoraModule
from ..layouts.peft import LANGUAGE_PART as PART
from ..seam.family import Batch
from ..techniques import MemoryPlan
from ._folders import Entry, new_folder, write_shards, write_text

HEAD, EMBEDDINGS = "lm_head", "model.embed_tokens.weight"
"""As all tied models of transformers name them."""
ROWS = 1 << 22
"""Weights whose sum is held in float32 at once."""
COPIED = (".json", ".txt", ".model", ".jinja", ".md")
NOT_COPIED = ("config.json", "README.md")


@dataclass
class Merged:
    """`rounding`: for each adapted tensor, what was lost to 16 bits, relative to the change that the LoRA makes."""

    folder: Path
    files: list[Path] = field(default_factory=list)
    rounding: dict[str, float] = field(default_factory=dict)

    def notices(self, quantisation: str | None = None) -> list[str]:
        lines = []
        if self.rounding:
            name, worst = max(self.rounding.items(), key=lambda pair: pair[1])
            lines.append(
                t(
                    pt=f"arredondar para 16 bits mudou no máximo {100 * worst:.1f} % do efeito do LoRA ({name})",
                    en=f"rounding to 16 bits changed at most {100 * worst:.1f} % of the LoRA's effect ({name})",
                )
            )
        if quantisation:
            lines.append(
                t(
                    pt=f"o LoRA foi treinado sobre a base em {quantisation} e mesclado na de 16 bits: as respostas podem "
                    "diferir; veja o desvio medido",
                    en=f"the LoRA was trained on the {quantisation} base and merged into the 16-bit one: answers may "
                    "differ; see the measured drift",
                )
            )
        return lines


@dataclass(frozen=True)
class Drift:
    """Of two models' next-token distributions over the same tokens."""

    kl: float
    """Mean KL divergence from the first to the second, in nats."""
    agreement: float
    """Share of tokens whose likeliest successor is the same."""
    loss: tuple[float, float]
    """Mean loss of either."""

    def line(self) -> str:
        share, first, second = 100 * self.agreement, *self.loss
        return t(
            pt=f"desvio do modelo mesclado: KL {self.kl:.4f}, mesma palavra em {share:.1f} %, perda {first:.4f} → {second:.4f}",
            en=f"drift of the merged model: KL {self.kl:.4f}, same word in {share:.1f} %, loss {first:.4f} → {second:.4f}",
        )


def merge(
    family: CausalLM, lora: Lora, folder: Path, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 5_000_000_000
) -> Merged:
    """Write the merged model in `dtype` (its matrices and vectors alike); SourceError where a module has no tensor."""
    merged = Merged(folder)
    stored, modules = family.base.stored(), _by_key(family, lora)
    entries = [_entry(key, each, modules.get(key), dtype, merged) for key, each in stored.items()]
    heads = [path for path in lora if _is_tied_head(family, path)]
    entries = [entry for entry in entries if not heads or entry.name != _parameter(heads[0])]
    entries += [_own_head(family, path, lora[path], dtype, merged) for path in heads]
    with new_folder(folder, sum(entry.nbytes for entry in entries)) as place:
        files = write_shards(place, entries, shard_bytes)
        merged.files = [folder / path.name for path in files]
        _write_configs(family, place, dtype, untied=bool(heads))
    return merged


def _parameter(path: str) -> str:
    return f"{path.removeprefix(f'{PART}.')}.weight"


def _by_key(family: CausalLM, lora: Lora) -> dict[str, LoraModule]:
    """Name in the base's files -> the module that changes it."""
    keys = {path: family.base.key_of(_parameter(path)) for path in lora}
    lost = [path for path, key in keys.items() if key is None and not _is_tied_head(family, path)]
    if lost:
        few = f"{lost[0]}, …"
        raise SourceError.said(
            pt=f"não sei mesclar {len(lost)} módulos, cujos pesos o modelo base guarda de outra forma ({few})",
            en=f"{len(lost)} modules cannot be merged: the base keeps their weights in another form ({few})",
            hint_pt="use o adaptador PEFT, que serve do mesmo jeito",
            hint_en="use the PEFT adapter, which serves as well",
            where=family.source.what,
        )
    return {key: lora[path] for path, key in keys.items() if key is not None and not _is_tied_head(family, path)}


def _is_tied_head(family: CausalLM, path: str) -> bool:
    return bool(family.config.tie_word_embeddings) and path == f"{PART}.{HEAD}"


def _entry(key: str, stored: Stored, module: LoraModule | None, dtype: torch.dtype, merged: Merged) -> Entry:
    def make() -> Tensor:
        with host_memory():
            weight = stored.read()
            return weight.to(stored.dtype or dtype) if module is None else _added(key, weight, module, dtype, merged)

    return Entry(key, stored.shape, stored.dtype or dtype, make)


def _own_head(family: CausalLM, path: str, module: LoraModule, dtype: torch.dtype, merged: Merged) -> Entry:
    """An adapter on a head that shares the embeddings' weight gives the merged model a head of its own."""
    key = family.base.key_of(EMBEDDINGS)
    assert key is not None, "the usual names, or the head would not be known as tied"
    return _entry(_parameter(path), family.base.stored()[key], module, dtype, merged)


@torch.no_grad()
def _added(key: str, weight: Tensor, module: LoraModule, dtype: torch.dtype, merged: Merged) -> Tensor:
    """Some rows at a time."""
    out = torch.empty(weight.shape, dtype=dtype)
    height = max(1, ROWS // weight[0].numel())
    lost = change = 0.0
    for start in range(0, len(weight), height):
        rows = slice(start, start + height)
        before = weight[rows].float()
        after = before + module.scale * (module.up[rows].float() @ module.down.float())
        if module.magnitude is not None:
            after *= (module.magnitude[rows] / torch.linalg.vector_norm(after, dim=1))[:, None]
        out[rows] = after.to(dtype)
        lost += float((out[rows].float() - after).square().sum())
        change += float((after - before).square().sum())
    merged.rounding[key] = (lost / change) ** 0.5 if change else 0.0
    return out


def _write_configs(family: CausalLM, place: Path, dtype: torch.dtype, *, untied: bool) -> None:
    config: dict[str, Any] = family.config.to_dict()
    config = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "_name_or_path", "torch_dtype")
    }
    config["architectures"] = config.get("architectures") or [_class_name(config["model_type"])]
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["tie_word_embeddings"] = bool(config.get("tie_word_embeddings")) and not untied
    write_text(place / "config.json", json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    source = family.source.path
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        weights = path.name.endswith(".index.json") or path.name.startswith("adapter_")
        if path.is_file() and path.suffix in COPIED and path.name not in NOT_COPIED and not weights:
            shutil.copyfile(path, place / path.name)


def _class_name(model_type: str) -> str:
    """Configs made from a GGUF file lack it, and readers go by it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


@torch.no_grad()
def measure_drift(
    family: CausalLM,
    trained: nn.ModuleDict,
    merged: Path,
    batches: Sequence[Batch],
    plan: MemoryPlan | None = None,
) -> Drift:
    """Between the live model (adapters on, base as it was trained on) and the merged folder, loaded in its own dtype.

    `plan` may stream the merged model, from disk if need be. Its device is that of the live model.
    """
    other = CausalLM.open(open_source(str(merged)), ModelConfig(base_model=str(merged)))
    device = family.probe(trained).device
    dtype = getattr(torch, str(other.config.dtype).removeprefix("torch."))
    prepare = (lambda model: plan.convert(model, other.blocks(model))) if plan else None
    model = other.load_model(device, dtype, prepare=prepare)
    if plan:
        plan.wrap(model, other.blocks(model))
    pairs = [(_log_shares(family, trained, b), _log_shares(other, model, b)) for b in batches]
    first, second = map(torch.cat, zip(*pairs, strict=True))
    tokens = torch.cat([find_targets(b["labels"], b["weight"]).tokens.cpu() for b in batches])
    kl = F.kl_div(second, first, reduction="none", log_target=True).sum(1).mean()
    losses = tuple(float(-each.gather(1, tokens[:, None]).mean()) for each in (first, second))
    return Drift(float(kl), float((first.argmax(1) == second.argmax(1)).float().mean()), (losses[0], losses[1]))


def _log_shares(family: CausalLM, model: nn.ModuleDict, batch: Batch) -> Tensor:
    """Log-probabilities (N, V) of the label tokens' places, float32 on the CPU."""
    model.eval()
    device = next(p.device for p in model.parameters() if p.device.type != "meta")
    batch = {name: value.to(device) for name, value in batch.items()}
    targets = find_targets(batch["labels"], batch["weight"])
    states = family.hidden_states(model, batch, texts_of(batch.get("segment_ids"), batch["input_ids"].shape))
    head = family.head(model)
    return head.shaped(head.module(states.flatten(0, 1)[targets.places])).log_softmax(1).cpu()
