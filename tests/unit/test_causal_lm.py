"""Language models are loaded as transformers loads them, told apart from what cannot be trained, and planned without weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_language_models import KINDS, batch_of, open_tiny, save_tiny, texts
from torch import Tensor
from transformers import AutoModelForCausalLM

from lora_trainer.bases.architecture import shipped_folder
from lora_trainer.config.schema import Config, ModelConfig
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.families.causal_lm.family import PART, CausalLM
from lora_trainer.files.arch import releases
from lora_trainer.files.sources import open_source
from lora_trainer.planner.simulate import Shape, simulate_run
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.embedding_offload import EmbeddingOffload
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.quantize_4bit import Quantize4bit

CPU, META = torch.device("cpu"), torch.device("meta")


def _logits(family: CausalLM, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.no_grad():
        return family.probe(family.load_model(CPU, dtype))


def _theirs(folder: Path, dtype: torch.dtype = torch.float32, vocabulary: int = 96) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    ids = torch.randint(vocabulary, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits.float()


def _same(own: Tensor, other: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(own, other, rtol=0, atol=tolerance * float(other.abs().max()))


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path, kind)
    _same(_logits(open_tiny(tmp_path)), _theirs(tmp_path))


@pytest.mark.parametrize("kind", ["llama3_rope", "gemma3_text", "granite"])
def test_in_sixteen_bits_too(tmp_path: Path, kind: str) -> None:
    """Rotary frequencies in bfloat16 would be off by 0.4 %; transformers keeps them, and so do we."""
    save_tiny(tmp_path, kind, gain=1.0)
    family = open_tiny(tmp_path)
    model: Any = family.load_model(CPU, torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = dict(reference.named_buffers())
    for name, buffer in model[PART].named_buffers():
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer, theirs[name]), name
    _same(_logits(family, torch.bfloat16), _theirs(tmp_path, torch.bfloat16), 0.03)


def test_shards_and_old_prefixes_are_read(tmp_path: Path) -> None:
    """A file saved from the body alone has no `model.` before its names."""
    save_tiny(tmp_path / "whole", "llama_tied")
    save_tiny(tmp_path / "shards", "llama_tied", shard_bytes=60_000)
    expected = _logits(open_tiny(tmp_path / "whole"))
    assert torch.equal(_logits(open_tiny(tmp_path / "shards")), expected)
    shutil.copytree(tmp_path / "whole", tmp_path / "body")
    path = tmp_path / "body/model.safetensors"
    bare = {key.removeprefix("model."): tensor for key, tensor in load_file(path).items()}
    save_file(bare, path, {"format": "pt"})
    assert torch.equal(_logits(open_tiny(tmp_path / "body")), expected)


def test_a_tied_head_holds_no_second_copy(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama_tied")
    model: Any = open_tiny(tmp_path).load_model(CPU, torch.float32)
    assert model[PART].lm_head.weight is model[PART].model.embed_tokens.weight
    assert not any("lm_head" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("case", ["equal copy", "own head", "head only"])
def test_files_that_disagree_with_the_config_on_tying(tmp_path: Path, case: str) -> None:
    save_tiny(tmp_path, "llama_tied")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embeddings.flip(0).contiguous() if case == "own head" else embeddings.clone()
    if case == "head only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, {"format": "pt"})
    family = open_tiny(tmp_path)
    _same(_logits(family), _theirs(tmp_path))
    assert family.config.tie_word_embeddings == (case != "own head")
    assert family.notices == []


def test_loading_holds_one_tensor_besides_the_packed_base(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", num_hidden_layers=8, hidden_size=128, intermediate_size=256)
    family, plan = open_tiny(tmp_path), MemoryPlan((Quantize4bit(),))
    with MemoryTracker() as tracker:
        model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    assert held < 0.35 * family.num_bytes(torch.float32)
    assert tracker.peak < held + 4 * 256 * 128 * 4


def test_missing_misshapen_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "vision.patch.weight": torch.zeros(2)}, path, {"format": "pt"})
    assert "vision.patch.weight" in open_tiny(tmp_path).notices[0]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.norm\.weight.*up_proj\.weight \[3, 64\] ≠ \[128, 64\]"):
        open_tiny(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}, "Conv1D"),
        ({"model_type": "bloom", "n_layer": 1, "hidden_size": 8, "n_head": 2}, "atenção própria"),
        ({"model_type": "novidade"}, "não conhece"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"já está quantizado \(gptq\)"),
        ({"quantization_config": "gptq"}, r"já está quantizado \(gptq\)"),
        ({"hidden_size": 63}, "config.json"),
        ({"hidden_act": "nenhuma"}, r"config\.json não descreve um modelo llama: 'nenhuma'"),
        ({"rope_parameters": {"rope_type": "outra"}}, r"config\.json não descreve um modelo llama: 'outra'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_tiny(tmp_path, "llama")
    _config(tmp_path, **changes)
    with pytest.raises(SourceError, match=message):
        open_tiny(tmp_path)


def test_the_type_alone_tells_a_language_model(tmp_path: Path) -> None:
    """Config files need not name a class: transformers goes by model_type."""
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "architectures"}))
    assert CausalLM.takes(open_source(str(tmp_path)))


def test_a_text_encoder_cannot_be_trained_beside_it(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="codificador de texto"):
        open_tiny(tmp_path, train_text_encoder=True)


def test_a_single_file_needs_a_config(tmp_path: Path) -> None:
    save_tiny(tmp_path / "folder", "llama")
    alone = shutil.copy(tmp_path / "folder/model.safetensors", tmp_path / "modelo.safetensors")
    with pytest.raises(SourceError, match=r"config\.json"):
        open_tiny(Path(alone))
    family = open_tiny(Path(alone), architecture=str(tmp_path / "folder"))
    assert torch.equal(_logits(family), _logits(open_tiny(tmp_path / "folder")))


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "qwen3_moe", "mistral"])
def test_generates_what_transformers_generates_and_trains_on(tmp_path: Path, kind: str) -> None:
    save_tiny(tmp_path, kind, gain=1.0)
    family, prompts = open_tiny(tmp_path), [texts(6)[0], texts(11, seed=3)[0]]
    plan = MemoryPlan((EmbeddingOffload(), BlockStreaming(), GradientCheckpointing()))
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    plan.wrap(model, family.blocks(model))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    before = family.loss(model.train(), batch_of([texts(9)[0]]))
    free = [_alone(reference, prompt, [95, 94]) for prompt in prompts]
    stop = [free[0][4], 95]  # the first prompt ends where the second does not
    expected = [_alone(reference, prompt, stop) for prompt in prompts]
    assert len(expected[0]) < len(expected[1])
    assert family.generate(model, prompts, 12, stop) == expected
    assert family.generate(model, prompts[:1], 12, stop) == expected[:1]
    assert torch.equal(family.loss(model, batch_of([texts(9)[0]])), before)
    assert model.training


def _alone(reference: Any, prompt: list[int], stop: list[int]) -> list[int]:
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=stop)
    return out[0, len(prompt) :].tolist()


BILLIONS = {
    "gemma-2-27b": 27.227, "gemma-2-2b": 2.614, "gemma-2-9b": 9.242, "gemma-3-1b": 1.000, "gemma-3-270m": 0.268,
    "llama-3.1-8b": 8.030, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213, "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.248, "mistral-small-24b": 23.572, "phi-3.5-mini": 3.821, "phi-4": 14.660,
    "phi-4-mini": 3.836, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764,
    "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-14b": 14.768,
    "qwen3-30b-a3b": 30.532, "qwen3-32b": 32.762, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "smollm2-1.7b": 1.711,
    "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm3-3b": 3.075, "tinyllama-1.1b": 1.100,
}  # fmt: skip
"""As their makers count them."""


def test_every_shipped_shape_has_a_known_size() -> None:
    assert releases("causal_lm") == sorted(BILLIONS)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-14b", "gemma-2-9b", "phi-3.5-mini", "smollm2-135m"])
def test_a_shape_has_the_size_of_its_model(name: str) -> None:
    source = replace(open_source(str(shipped_folder(name))), planning=True)
    family = CausalLM.open(source, ModelConfig())
    assert family.num_bytes(torch.bfloat16) == pytest.approx(2e9 * BILLIONS[name], abs=2e6)


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("streams", [False, True])
def test_simulated_peak_is_the_tracked_one(tmp_path: Path, kind: str, streams: bool) -> None:
    """Every token a label, one text a row: the simulation's batch, run for real on this CPU. 2 %, and never under."""
    save_tiny(tmp_path, kind, num_hidden_layers=3, vocab_size=512, max_position_embeddings=512)
    family, length = open_tiny(tmp_path), 256
    techniques = (Quantize4bit(), GradientCheckpointing())
    plan = MemoryPlan((*techniques, EmbeddingOffload(), BlockStreaming()) if streams else techniques)
    settings = ModelConfig(lora_rank=4, lora_targets="all")
    config = Config(model=settings)
    shape = Shape(2, (length, 1), previews=False)
    predicted = simulate_run(family, config, torch.float32, plan, shape).phases  # type: ignore[arg-type]
    real = _tracked_step(family, config, plan, batch_of(*([text] for text in texts(length, length, vocabulary=500))))
    peak = max(predicted[phase].total for phase in ("forward", "backward", "optimizer"))
    assert real <= peak * 1.001
    assert peak <= real * (1.25 if kind == "qwen3_moe" else 1.02)


def _tracked_step(family: CausalLM, config: Config, plan: MemoryPlan, batch: dict[str, Tensor]) -> int:
    """Bytes at the peak of the second optimizer step."""
    from lora_trainer import loop
    from lora_trainer.adapters import inject
    from lora_trainer.engine.block_streaming import ring_buffers
    from lora_trainer.engine.tracker import mark_resident
    from lora_trainer.optim import optimizers

    tracker = MemoryTracker()
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    adapter = inject(model, family, config.model, 0, formats=("peft",))
    plan.wrap(model, family.blocks(model))
    named = adapter.named_parameters()
    optimizer = plan.build_optimizer(optimizers.param_groups(named, config.training), config.training)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainee = loop.Trainee(family, model, list(named.values()), optimizer, scaler, plan, CPU, 0, 1.0)  # type: ignore[arg-type]
    with tracker:
        mark_resident(model, tracker)
        tracker.mark(ring_buffers(model), "frozen")
        for _ in loop.train(trainee, [(0, [batch])], lambda step: 1.0):
            pass
        tracker.peak = tracker.now
        for _ in loop.train(trainee, [(1, [batch])], lambda step: 1.0):
            pass
    return tracker.peak
