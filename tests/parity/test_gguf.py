"""LoRAs trained on a base in its GGUF blocks: losses and adapters of the same weights unpacked, under every technique."""

from pathlib import Path

import pytest
import torch
from helpers.gguf_files import VOCABULARY, tiny_model, write_model
from helpers.gguf_lm import GgufLM
from torch import Tensor

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig, TrainingConfig
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.engine.packed import packing_report
from lora_trainer.export.gguf_lora import read_gguf_lora, write_gguf_lora
from lora_trainer.files.gguf_blocks import SUPPORTED
from lora_trainer.loop import Trainee, train
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.seam.family import Batch
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.embedding_offload import EmbeddingOffload
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.mixed_precision import MixedPrecision

CPU = torch.device("cpu")
STEPS = 20
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
K_KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def base(folder: Path, kind: str, name: str = "llama") -> Path:
    path = folder / f"{name}-{kind}.gguf"
    if not path.exists():
        write_model(path, tiny_model(name, **(WIDE if kind in K_KINDS else {})), name, kind)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def make_batch(family: GgufLM, step: int) -> Batch:
    """Two random texts to be learnt by heart, over and over."""
    batch = family.example_batch(2, (12, 1))
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step % 4))
    return {**batch, "input_ids": ids, "labels": ids.clone(), "segment_ids": torch.ones_like(ids)}


def run(
    family: GgufLM,
    *techniques: Technique,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
    targets: str = "all",
) -> tuple[list[float], dict[str, Tensor], torch.nn.ModuleDict]:
    """The losses and the adapter of the real loop."""
    training, plan = TrainingConfig(learning_rate=1e-2), MemoryPlan(techniques)
    model = family.load_model(CPU, dtype, prepare=lambda m: plan.convert(m, family.blocks(m)))
    settings = ModelConfig(lora_rank=4, lora_targets=targets)
    adapter = inject(model, family, settings, seed=0, formats=("diffusers",))
    named = adapter.named_parameters()
    plan.wrap(model, family.blocks(model))
    optimizer = plan.build_optimizer(param_groups(named, training), training)
    trainee = Trainee(family, model, list(named.values()), optimizer, plan.scaler(), plan, CPU, 0, 1.0)
    windows = enumerate([make_batch(family, step)] for step in range(steps))
    losses = [report.loss for report in train(trainee, windows, lambda step: 1.0)]
    return losses, adapter.state_dict(), model


def same(first: tuple[list[float], dict[str, Tensor], object], second: tuple[list[float], dict[str, Tensor], object]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    for key, value in first[1].items():
        torch.testing.assert_close(value, second[1][key], rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize("kind", sorted(SUPPORTED - {"F32"}))
def test_packed_trains_as_unpacked(folder, kind):
    path = base(folder, kind)
    packed = run(GgufLM(path))
    assert packing_report(GgufLM(path).blocks(packed[2]))[0] == 14
    same(packed, run(GgufLM(path, packed=False)))
    assert packed[0][-1] < 0.7 * packed[0][0]


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma3", "qwen3moe"])
def test_other_architectures(folder, name):
    path = base(folder, "Q8_0", name)
    same(run(GgufLM(path), steps=5), run(GgufLM(path, packed=False), steps=5))


TECHNIQUES: dict[str, tuple[Technique, ...]] = {
    "checkpointing": (GradientCheckpointing(),),
    "streaming": (GradientCheckpointing(), BlockStreaming()),
    "half streaming": (GradientCheckpointing(), BlockStreaming(fraction=0.5, slots=1)),
    "embeddings": (GradientCheckpointing(), EmbeddingOffload()),
    "offload": (GradientCheckpointing(), ActivationOffload(), BlockStreaming()),
}


@pytest.mark.parametrize("techniques", TECHNIQUES.values(), ids=TECHNIQUES)
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_techniques_change_nothing(folder, kind, techniques):
    path = base(folder, kind)
    same(run(GgufLM(path), *techniques, steps=4), run(GgufLM(path), steps=4))


def test_an_adapter_on_the_head(folder):
    path, targets = base(folder, "Q6_K", "qwen2"), r"language_model\.lm_head"
    packed = run(GgufLM(path), targets=targets, steps=8)
    same(packed, run(GgufLM(path, packed=False), targets=targets, steps=8))
    assert all(later < first for first, later in zip(packed[0][:4], packed[0][4:], strict=True))


def test_streamed_from_a_mapped_master(folder, tmp_path):
    path = base(folder, "Q4_1")
    mapped = BlockStreaming(mapped=True, folder=str(tmp_path))
    streamed = run(GgufLM(path), GradientCheckpointing(), mapped, steps=4)
    report = streaming_report(streamed[2])
    assert report is not None
    assert report.blocks == 2
    same(streamed, run(GgufLM(path), steps=4))


def test_under_bf16(folder):
    path, bf16 = base(folder, "Q4_K"), MixedPrecision("bf16", "cpu")
    packed = run(GgufLM(path), bf16, GradientCheckpointing(), dtype=torch.bfloat16, steps=6)
    plain = run(GgufLM(path, packed=False), bf16, dtype=torch.bfloat16, steps=6)
    assert packed[0] == pytest.approx(plain[0], rel=1e-3)


def test_the_trained_adapter_survives_its_file(folder, tmp_path):
    """Merged into the base from the adapter file, it gives the logits that the trainer's model gives."""
    family = GgufLM(base(folder, "Q4_1"))
    training = TrainingConfig(learning_rate=1e-2)
    model = family.load_model(CPU, torch.float32)
    adapter = inject(model, family, ModelConfig(lora_rank=4, lora_targets="all"), seed=0, formats=("diffusers",))
    named, plan = adapter.named_parameters(), MemoryPlan(())
    optimizer = plan.build_optimizer(param_groups(named, training), training)
    trainee = Trainee(family, model, list(named.values()), optimizer, plan.scaler(), plan, CPU, 0, 1.0)
    list(train(trainee, enumerate([make_batch(family, step)] for step in range(4)), lambda step: 1.0))
    path = write_gguf_lora(adapter.export(), family.config, tmp_path / "lora.gguf", precision="fp32")
    plain = GgufLM(base(folder, "Q4_1"), packed=False).load_model(CPU, torch.float32)
    before = family.probe(plain)
    for name, module in read_gguf_lora(path, family.config, adapter.layers).items():
        plain.get_submodule(name).weight.add_(module.delta())
    with torch.no_grad():
        trained, merged = family.probe(model.eval()), family.probe(plain)
    assert float((trained - before).abs().max()) > 0.1
    torch.testing.assert_close(merged, trained, rtol=0, atol=1e-4)
