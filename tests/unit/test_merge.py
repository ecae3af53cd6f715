"""A merged folder is a model that transformers loads and that answers as base and adapter did; RAM stays with one tensor."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_peft_folder import _trained
from tiny_language_models import batch_of, open_tiny, save_tiny, texts
from transformers import AutoModelForCausalLM

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import MachineError
from lora_trainer.export._folders import new_folder
from lora_trainer.export.merge import measure_drift, merge
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.quantize_4bit import Quantize4bit

CPU = torch.device("cpu")


def _logits(folder: Path, vocabulary: int) -> torch.Tensor:
    ids = torch.randint(vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    return logits


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2", "phi3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"lora_targets": r"q_proj|qkv_proj|lm_head"}])
def test_the_merged_model_is_base_and_adapter(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    family, model, adapter = _trained(tmp_path / "base", kind, **settings)
    merged = merge(family, adapter.export(), tmp_path / "merged", torch.float32)
    with torch.no_grad():
        expected = family.probe(model)
    own = _logits(tmp_path / "merged", family.config.vocab_size)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert len(merged.rounding) == len(adapter.layers)
    assert max(merged.rounding.values()) < 1e-5
    with torch.no_grad():
        assert torch.equal(family.probe(model), expected)


def test_sixteen_bits_and_what_they_cost(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    merged = merge(family, adapter.export(), tmp_path / "merged")
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(merged.files[0], "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    with torch.no_grad():
        expected = family.probe(model)
    own = _logits(tmp_path / "merged", family.config.vocab_size)
    assert 0 < float((own - expected).norm() / expected.norm()) < 0.02
    assert 1e-4 < max(merged.rounding.values()) < 0.05
    assert "16 bits" in merged.notices()[0]


def test_shards_and_their_index(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    merged = merge(family, adapter.export(), tmp_path / "merged", torch.float32, shard_bytes=60_000)
    assert len(merged.files) > 2
    assert all(path.stat().st_size < 70_000 for path in merged.files)
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(family.base.stored())
    with torch.no_grad():
        expected = family.probe(model)
    torch.testing.assert_close(_logits(tmp_path / "merged", 96), expected, rtol=0, atol=1e-4)


def test_a_sharded_base_is_read_and_merged(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "base", "llama", gain=1.0, shard_bytes=60_000)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    family = open_tiny(tmp_path / "base")
    merge(family, {}, tmp_path / "merged", torch.float32)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        assert torch.equal(ours, reference(ids).logits)


def test_ram_holds_one_tensor(tmp_path: Path) -> None:
    family, _, adapter = _trained(tmp_path / "base")
    lora = adapter.export()
    sizes = [4 * torch.Size(each.shape).numel() for each in family.base.stored().values()]
    total, largest = sum(sizes), max(sizes)
    with MemoryTracker() as tracker:
        merge(family, lora, tmp_path / "merged", torch.float32)
    assert tracker.host_peak + tracker.peak < 7 * largest < total


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    """Gigabytes, of a merged model; what a living process writes stays."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f".antes-merged.{pid}.tmp").mkdir()
    with new_folder(tmp_path / "novo"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".antes-merged.{os.getppid()}.tmp", "novo"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, _, adapter = _trained(tmp_path / "base")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("lora_trainer.export._folders.shutil.disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match="disco"):
        merge(family, adapter.export(), tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_drift_is_nil_on_the_same_base_and_told_on_a_quantised_one(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    batches = [batch_of([texts(24)[0]]), batch_of([texts(17, seed=8)[0]])]
    merge(family, adapter.export(), tmp_path / "merged", torch.float32)
    same = measure_drift(family, model, tmp_path / "merged", batches)
    assert same.kl < 1e-6
    assert same.agreement == 1
    plan = MemoryPlan((Quantize4bit(),))
    packed = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    settings = ModelConfig(lora_rank=4, lora_alpha=10.0, lora_targets="all")
    trained = inject(packed, family, settings, 0, formats=("diffusers",))  # type: ignore[arg-type]
    trained.load_state_dict(adapter.state_dict())
    streamed = MemoryPlan((BlockStreaming(mapped=True, folder=str(tmp_path / "map")), GradientCheckpointing()))
    drift = measure_drift(family, packed, tmp_path / "merged", batches, streamed)
    assert drift.kl > 1e-4
    assert drift.agreement < 1
    assert f"{drift.kl:.4f}" in drift.line()
