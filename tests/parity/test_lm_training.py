"""A language model's training step: against transformers' own loss, packed against unpacked, each technique against none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.counts import recomputations
from tiny_language_models import KINDS, batch_of, open_tiny, save_tiny, texts
from torch import Tensor, nn

from lora_trainer.adapters import Adapter, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.families.causal_lm.family import PART, CausalLM
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.embedding_offload import EmbeddingOffload
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

CPU = torch.device("cpu")
ARCHITECTURES = ["llama_tied", "mistral", "gemma2", "gemma3_text", "phi3", "qwen3_moe"]
Gradients = dict[str, Tensor]


class Run:
    """A model with adapters that have left their start, under some techniques."""

    def __init__(self, family: CausalLM, *techniques: Technique, targets: str = "all") -> None:
        self.family, self.plan = family, MemoryPlan(techniques)
        settings = ModelConfig(lora_rank=4, lora_targets=targets)
        self.model = family.load_model(
            CPU, torch.float32, prepare=lambda model: self.plan.convert(model, family.blocks(model))
        )
        groups = family.blocks(self.model)
        self.adapter: Adapter = inject(self.model, family, settings, 0, formats=("diffusers",))  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for key, parameter in self.adapter.named_parameters().items():
                if "lora_B" in key:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        self.plan.wrap(self.model, groups)

    def gradients(self, *window: dict[str, Tensor]) -> tuple[float, Gradients]:
        """The loss over a window of batches, and the adapters' gradients, as the loop makes them."""
        self.model.train()
        terms, total = sum(map(self.family.num_terms, window)), 0.0
        for batch in window:
            with self.plan.step_context():
                loss = self.family.loss(self.model, batch) / terms
            loss.backward()
            total += loss.item()
        parameters = self.adapter.named_parameters()
        return total, {key: p.grad.clone() for key, p in parameters.items() if p.grad is not None}


def _same(first: tuple[float, Gradients], second: tuple[float, Gradients], tolerance: float = 1e-5) -> None:
    assert first[0] == pytest.approx(second[0], rel=tolerance)
    assert first[1].keys() == second[1].keys()
    assert first[1]
    for key, gradient in first[1].items():
        scale = float(second[1][key].abs().max())
        torch.testing.assert_close(gradient, second[1][key], rtol=0, atol=tolerance * scale + 1e-9, msg=key)


@pytest.fixture(params=ARCHITECTURES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    save_tiny(tmp_path, request.param)
    return open_tiny(tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> CausalLM:
    save_tiny(tmp_path, "llama", num_hidden_layers=4, gain=1.0)
    return open_tiny(tmp_path)


def _theirs(run: Run, batch: dict[str, Tensor]) -> Tensor:
    """transformers' own forward and loss, in eager attention, on the same modules."""
    model: Any = run.model[PART]
    model.config._attn_implementation = "eager"
    out = model(input_ids=batch["input_ids"], attention_mask=(batch["segment_ids"] > 0).long())
    model.config._attn_implementation = "lora_trainer"
    logits = out.logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_loss_and_gradients_are_those_of_transformers(family: CausalLM) -> None:
    batch = batch_of([texts(20)[0]], [texts(13, seed=6)[0]], ignored=4)
    run = Run(family)
    run.model.train()
    _theirs(run, batch).backward()
    parameters = run.adapter.named_parameters()
    expected = {key: p.grad.clone() for key, p in parameters.items() if p.grad is not None}
    loss = _theirs(run, batch).item()
    for parameter in parameters.values():
        parameter.grad = None
    _same(run.gradients(batch), (loss, expected), 2e-5)


def test_packed_equals_unpacked(family: CausalLM) -> None:
    """Other texts before it in the row change nothing: not the loss, not the gradient; neither does a longer row."""
    pieces = texts(9, 14, 11, 5)
    alone = Run(family).gradients(*(batch_of([piece]) for piece in pieces))
    packed = Run(family).gradients(batch_of([pieces[0], pieces[1]], [pieces[2], pieces[3]]))
    _same(packed, alone)


def test_what_comes_before_in_the_row_is_not_seen(family: CausalLM) -> None:
    run, (first, other, second) = Run(family), texts(9, 9, 12)
    with torch.no_grad():
        losses = [run.family.loss(run.model, _only_last(batch_of([before, second]), 12)) for before in (first, other)]
        mixed = batch_of([first + second])
        mixed["labels"][:, :10] = -100
        different = run.family.loss(run.model, mixed)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    assert abs(float(different - losses[0])) > 1e-2  # the same tokens as one text do see each other


def _only_last(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    batch["labels"][:, :-length] = -100
    return batch


def test_accumulation_of_unequal_lengths_equals_one_batch(llama: CausalLM) -> None:
    pieces = texts(5, 17, 9, 12)
    small, four = Run(llama).gradients(*(batch_of([piece], ignored=2) for piece in pieces))
    large, one = Run(llama).gradients(batch_of(*([piece] for piece in pieces), ignored=2))
    assert small == pytest.approx(large, rel=1e-6)
    first, second = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (four, one))
    assert float((first - second).norm() / second.norm()) < 1e-6


LOSSLESS: dict[str, Sequence[Technique]] = {
    "checkpointing": [GradientCheckpointing()],
    "offload": [GradientCheckpointing(), ActivationOffload()],
    "streaming": [GradientCheckpointing(), BlockStreaming()],
    "half streaming": [GradientCheckpointing(), BlockStreaming(fraction=0.5, slots=1)],
    "embeddings": [EmbeddingOffload()],
    "all": [EmbeddingOffload(), BlockStreaming(), GradientCheckpointing(), ActivationOffload()],
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_technique_changes_nothing(family: CausalLM, name: str) -> None:
    batch = batch_of([texts(12)[0], texts(8, seed=2)[0]], [texts(15, seed=6)[0]], ignored=3)
    run = Run(family, *LOSSLESS[name])
    _same(run.gradients(batch), Run(family).gradients(batch))
    assert name == "embeddings" or recomputations(run.model) > 0


@pytest.mark.parametrize("quantiser", [Quantize4bit(), Quantize8bit()])
def test_quantised_streamed_equals_quantised_resident(llama: CausalLM, quantiser: Technique) -> None:
    batch = batch_of([texts(20)[0]])
    streamed = Run(llama, quantiser, EmbeddingOffload(), BlockStreaming(), GradientCheckpointing())
    _same(streamed.gradients(batch), Run(llama, quantiser).gradients(batch))


@pytest.mark.parametrize(("quantiser", "bound"), [(Quantize4bit(), 0.5), (Quantize8bit(), 0.04)])
def test_a_quantised_base_stays_within_its_bound(llama: CausalLM, quantiser: Technique, bound: float) -> None:
    """Of the logits after four layers of random weights, relative (root mean square)."""
    states = []
    for techniques in ((), (quantiser,)):
        run = Run(llama, *techniques)
        with torch.no_grad():
            states.append(run.family.probe(run.model))
    assert 0 < float((states[1] - states[0]).norm() / states[0].norm()) < bound


def test_an_adapter_on_the_head_trains_the_same_wherever_the_head_lives(llama: CausalLM) -> None:
    batch, targets = batch_of([texts(20)[0]]), r"lm_head|q_proj"
    plain = Run(llama, targets=targets).gradients(batch)
    assert any("lm_head" in key for key in plain[1])
    _same(Run(llama, EmbeddingOffload(), GradientCheckpointing(), targets=targets).gradients(batch), plain)


def test_experts_of_a_mixture_are_packed_but_get_no_adapter(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    family = open_tiny(tmp_path)
    run = Run(family, Quantize4bit())
    assert not any("experts" in path for path in run.adapter.layers)
    expert: Any = run.model.get_submodule(f"{PART}.model.layers.0.mlp.experts.3.down_proj")
    assert expert.packing.title == "nf4"
    assert run.gradients(batch_of([texts(20)[0]]))[1]


def test_every_architecture_has_targets(tmp_path: Path) -> None:
    counts = {}
    for kind in KINDS:
        save_tiny(tmp_path / kind, kind)
        family = open_tiny(tmp_path / kind)
        counts[kind] = [
            len(
                inject(
                    family.load_model(torch.device("meta"), torch.float32), family, settings, 0, ("peft",)
                ).layers
            )
            for settings in (ModelConfig(lora_targets=name) for name in ("attention", "attention+mlp", "all"))
        ]
    attention = {kind: 2 if kind in ("phi3", "gpt_neox") else 4 for kind in KINDS}
    for kind, (few, more, every) in counts.items():
        assert few == 2 * attention[kind], kind
        assert few <= more <= every, kind
        assert every == more, kind
        assert (more == few) == (kind in ("qwen3_moe", "mixtral")), kind
