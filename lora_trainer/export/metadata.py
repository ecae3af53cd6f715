"""What a file says about itself: modelspec.* 1.0.1, the ss_* keys that programs read, and our whole effective config.

Nothing here reads a clock or names a person: paths become base names, and the only date is the day the caller hands
in, so equal runs give equal files. Hashes follow https://github.com/Stability-AI/ModelSpec (modelspec.hash_sha256)
and sd-scripts (sshs_*).

Left out: ss_session_id and ss_training_started_at (they differ between equal runs), and modelspec.thumbnail.
"""

import hashlib
import heapq
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..config.schema import Config
from ..errors import t
from ..layouts.lora import LoraModule
from ..layouts.lycoris import LycorisModule
from ..layouts.table import Modules
from ..seam.family import Family

MAX_BYTES = 1_000_000
"""Of the metadata as JSON. safetensors refuses headers over 100 MB; viewers choke far below."""
CONFIG_KEY = "lora_trainer.config"
_TAGS = "ss_tag_frequency"
_MOST_TAGS = 50_000


@dataclass(frozen=True)
class RunFacts:
    """What only the run knows. `date` is a day, "2026-11-29"; `buckets` maps (width, height) to images."""

    name: str
    date: str
    seed: int
    step: int
    total_steps: int
    epoch: int
    num_images: int
    num_regularization_images: int = 0
    tag_frequency: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)


def describe(family: Family, config: Config, facts: RunFacts) -> dict[str, str]:
    """All but what the tensors tell (network_facts, hashes), which save_adapter adds."""
    entries = {**_modelspec(config, facts), **_training(config, facts), **anonymous(family.metadata())}
    entries[CONFIG_KEY] = anonymous(config.model_dump(mode="json"))
    return {key: _text(value) for key, value in entries.items() if value is not None}


def _modelspec(config: Config, facts: RunFacts) -> dict[str, Any]:
    width, height = config.data.resolution
    return {
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.implementation": "diffusers",
        "modelspec.title": config.output.title or facts.name,
        "modelspec.description": config.output.description,
        "modelspec.author": config.output.author,
        "modelspec.license": config.output.license,
        "modelspec.date": facts.date,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.trigger_phrase": config.data.trigger,
        "modelspec.timestep_range": f"{config.training.timestep_min},{config.training.timestep_max}",
        "modelspec.encoder_layer": config.model.clip_skip,
    }


def _training(config: Config, facts: RunFacts) -> dict[str, Any]:
    model, data, training = config.model, config.data, config.training
    text_rate = training.text_encoder_learning_rate or training.learning_rate / 2
    return {
        "ss_output_name": facts.name,
        "ss_sd_model_name": anonymous(model.base_model),
        "ss_resolution": f"({data.resolution[0]}, {data.resolution[1]})",
        "ss_clip_skip": model.clip_skip if model.clip_skip > 1 else None,
        "ss_num_train_images": facts.num_images,
        "ss_num_reg_images": facts.num_regularization_images,
        "ss_num_epochs": training.epochs,
        "ss_epoch": facts.epoch,
        "ss_steps": facts.step,
        "ss_max_train_steps": facts.total_steps,
        "ss_batch_size_per_device": training.batch_size,
        "ss_gradient_accumulation_steps": training.gradient_accumulation_steps,
        "ss_learning_rate": training.learning_rate,
        "ss_unet_lr": training.learning_rate,
        "ss_text_encoder_lr": text_rate if model.train_text_encoder else None,
        "ss_optimizer": training.optimizer,
        "ss_lr_scheduler": training.lr_scheduler,
        "ss_mixed_precision": training.mixed_precision,
        "ss_gradient_checkpointing": training.gradient_checkpointing != "no",
        "ss_max_grad_norm": training.max_grad_norm,
        "ss_loss_type": training.loss,
        "ss_min_snr_gamma": training.min_snr_gamma,
        "ss_noise_offset": training.noise_offset,
        "ss_prior_loss_weight": data.prior_weight if data.regularization_dir else None,
        "ss_seed": facts.seed,
        _TAGS: _tag_table(data.trigger, facts.tag_frequency),
        "ss_bucket_info": _bucket_table(facts.buckets),
    }


def network_facts(modules: Modules, kind: str, wide: Collection[str]) -> dict[str, str]:
    """Rank and alpha as the file's tensors have them: the commonest, and those of the `wide`, the convolutions over 1x1.

    As kohya's and LyCORIS's own trainers say it: `ss_network_args` tells the latter's algorithm, `kind`.
    """
    rank, alpha = _commonest([m for path, m in modules.items() if path not in wide] or modules.values())
    arguments = {} if kind == "lora" else {"algo": kind}
    if wide:
        arguments |= dict(zip(("conv_dim", "conv_alpha"), map(_number, _commonest([modules[path] for path in wide])), strict=True))
    if any("magnitude" in module.factors for module in modules.values()):
        arguments["dora_wd"] = "True"
    facts: dict[str, Any] = {
        "ss_network_module": "networks.lora" if kind == "lora" else "lycoris.kohya",
        "ss_network_dim": rank,
        "ss_network_alpha": _number(alpha),
        "ss_network_args": arguments,
    }
    return {key: _text(value) for key, value in facts.items()}


def hashes(body: bytes, training_only: bytes) -> dict[str, str]:
    """`body`: all tensor bytes. `training_only`: the file with ss_* metadata alone, for A1111's old short hash."""
    digest = hashlib.sha256(body).hexdigest()
    window = training_only[0x100000:0x110000]
    return {
        "sshs_model_hash": digest,
        "sshs_legacy_hash": hashlib.sha256(window).hexdigest()[:8],
        "modelspec.hash_sha256": f"0x{digest}",
    }


def capped(metadata: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Metadata within MAX_BYTES, all strings, and notices of what was left out: rare tags first, then large values."""
    entries = {key: _text(value) for key, value in metadata.items() if value is not None}
    notices: list[str] = []
    if _size(entries) > MAX_BYTES and _TAGS in entries:
        table = json.loads(entries.pop(_TAGS))
        total = sum(len(tags) for tags in table.values())
        entries[_TAGS], kept = _most_frequent(table, MAX_BYTES - _size({**entries, _TAGS: ""}))
        pt = f"metadados: só as {kept} etiquetas mais frequentes de {total} foram gravadas"
        en = f"metadata: only the {kept} most frequent of {total} tags were written"
        notices.append(t(pt=pt, en=en))
    while _size(entries) > MAX_BYTES:
        largest = max(entries, key=lambda key: len(entries[key].encode()))
        del entries[largest]
        pt, en = f"metadados: `{largest}` é grande demais e ficou de fora", f"metadata: `{largest}` is too large and was left out"
        notices.append(t(pt=pt, en=en))
    return entries, notices


def anonymous(value: Any) -> Any:
    """Full paths become base names, at any depth: they would tell the user's name. Hub ids stay."""
    if isinstance(value, Mapping):
        return {key: anonymous(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [anonymous(item) for item in value]
    if isinstance(value, str) and _is_full_path(value):
        return PureWindowsPath(value).name
    return value


def _is_full_path(text: str) -> bool:
    rooted = PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()
    return rooted or text.startswith(("~", "./", "../", ".\\", "..\\"))


def _tag_table(trigger: str | None, tables: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]] | None:
    if tables:
        return {PureWindowsPath(folder).name: dict(tags) for folder, tags in tables.items()}
    return {f"1_{trigger}": {trigger: 1}} if trigger else None


def _bucket_table(buckets: Mapping[tuple[int, int], int]) -> dict[str, Any] | None:
    if not buckets:
        return None
    rows = [{"resolution": list(size), "count": count} for size, count in sorted(buckets.items())]
    return {"buckets": {str(index): row for index, row in enumerate(rows)}}


def _most_frequent(table: Mapping[str, Mapping[str, int]], budget: int) -> tuple[str, int]:
    """The table's most frequent tags whose JSON fits in `budget` bytes, and how many they are."""
    flat = ((count, folder, tag) for folder, tags in table.items() for tag, count in tags.items())
    top = heapq.nsmallest(_MOST_TAGS, flat, key=lambda item: (-item[0], item[1], item[2]))
    kept = bisect_right(range(1, len(top) + 1), budget, key=lambda count: _size(_nested(top[:count])))
    return _nested(top[:kept]), kept


def _nested(rows: list[tuple[int, str, str]]) -> str:
    table: dict[str, dict[str, int]] = {}
    for count, folder, tag in rows:
        table.setdefault(folder, {})[tag] = count
    return json.dumps(table, ensure_ascii=False)


def _commonest(modules: Iterable[LoraModule | LycorisModule]) -> tuple[int, float]:
    return Counter((m.rank, round(m.alpha, 6)) for m in modules).most_common(1)[0][0]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _size(entries: Any) -> int:
    return len(json.dumps(entries, ensure_ascii=False).encode())


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (Mapping, list, tuple)) else str(value)
