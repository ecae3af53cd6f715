"""The language family on a GGUF base: the same verbs, packed weights, and what comes out of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.counts import packed_weights
from helpers.gguf_files import tiny_model, write_model
from test_lm_training import CPU, Run, _same
from tiny_language_models import batch_of, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_trainer.config.schema import Config, ModelConfig
from lora_trainer.engine.tracker import ROUNDING
from lora_trainer.export.merge import merge
from lora_trainer.families.causal_lm.base import GgufBase
from lora_trainer.families.causal_lm.family import PART, CausalLM
from lora_trainer.files.sources import Source
from lora_trainer.planner.simulate import Shape, simulate_run
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.embedding_offload import EmbeddingOffload
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing

MODELS = ["llama", "qwen3", "gemma2", "qwen3moe"]
IDS = torch.randint(96, (1, 16), generator=torch.Generator().manual_seed(0))


def open_gguf_family(path: Path) -> CausalLM:
    source = Source(path, "file", "modelo_base")
    assert CausalLM.takes(source)
    return CausalLM.open(source, ModelConfig(base_model=str(path)))


def _their_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_that_was_written(tmp_path: Path, name: str) -> None:
    reference = tiny_model(name)
    family = open_gguf_family(write_model(tmp_path / "base.gguf", reference, name))
    model = family.load_model(CPU, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(family.probe(model), _their_logits(reference), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_packed_streamed_equals_packed_resident(tmp_path: Path, name: str) -> None:
    family = open_gguf_family(write_model(tmp_path / "base.gguf", tiny_model(name), name, "Q8_0"))
    batch = batch_of([texts(12)[0], texts(8, seed=2)[0]], [texts(15, seed=6)[0]])
    plain, streamed = Run(family), Run(family, EmbeddingOffload(), BlockStreaming(), GradientCheckpointing())
    assert packed_weights(plain.model)["q8_0"] > 0
    _same(streamed.gradients(batch), plain.gradients(batch))


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_the_same_weights_unpacked(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "base.gguf", tiny_model(name), name, "Q8_0")
    packed = open_gguf_family(path)
    unpacked = CausalLM(packed.source, packed.settings, GgufBase(packed.source, unpacked=True))
    plain = Run(unpacked)
    assert packed_weights(plain.model) == {}
    batch = batch_of([texts(20)[0]])
    _same(Run(packed).gradients(batch), plain.gradients(batch))


def test_merging_unpacks_and_says_so(tmp_path: Path) -> None:
    family = open_gguf_family(write_model(tmp_path / "base.gguf", tiny_model("llama"), "llama", "Q8_0"))
    run = Run(family)
    merged = merge(family, run.adapter.export(), tmp_path / "merged", torch.float32)
    with torch.no_grad():
        expected = family.probe(run.model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_their_logits(theirs), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert "q8_0" in "".join(merged.notices("q8_0"))


def test_the_simulation_packs_too(tmp_path: Path) -> None:
    family = open_gguf_family(write_model(tmp_path / "base.gguf", tiny_model("llama"), "llama", "Q8_0"))
    config = Config(model=ModelConfig(lora_targets="all"))
    plan, shape = MemoryPlan((GradientCheckpointing(),)), Shape(1, (32, 1), previews=False)
    phases = simulate_run(family, config, torch.float32, plan, shape).phases  # type: ignore[arg-type]
    real = Run(family)
    frozen = [p for p in (*real.model[PART].parameters(), *real.model[PART].buffers()) if not p.requires_grad]
    assert phases["forward"].causes["frozen"] == sum(-(-x.nbytes // ROUNDING) * ROUNDING for x in frozen)


def test_packed_embeddings_and_head_leave_the_card_too(tmp_path: Path) -> None:
    family = open_gguf_family(write_model(tmp_path / "base.gguf", tiny_model("llama-3.1"), "llama-3.1", "Q8_0"))
    run = Run(family, EmbeddingOffload())
    model: Any = run.model[PART]
    assert model.lm_head.home == model.model.embed_tokens.home == CPU
    batch = batch_of([texts(20)[0]])
    _same(run.gradients(batch), Run(family).gradients(batch))
