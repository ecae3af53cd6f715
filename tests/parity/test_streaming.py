"""Streaming, offload, checkpointing and optimizer-in-backward, alone and in pairs, against the plain run on real families."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.counts import recomputations
from helpers.original_checkpoint import write_single_file
from torch import nn

from lora_trainer import adapters
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.unet import text_body
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.families import resolve
from lora_trainer.loop import Trainee, train
from lora_trainer.optim.in_backward import InBackward
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.seam.family import Batch, BlockGroup
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.cast_fp8 import CastFp8
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.mixed_precision import MixedPrecision
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

CPU = torch.device("cpu")
RELEASES = ("sd1", "sdxl")
CHECKPOINTING, STREAMING, OFFLOAD = GradientCheckpointing(), BlockStreaming(), ActivationOffload(min_bytes=1)
BF16 = MixedPrecision(dtype="bf16", device="cpu")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for release in RELEASES:
        (root / release).mkdir()
        write_single_file(root / release / "base.safetensors", release)
    return {release: root / release / "base.safetensors" for release in RELEASES}


@dataclass
class Run:
    """A model trained for a few optimizer steps of two micro-batches of two images."""

    base: Path
    techniques: tuple[Technique, ...] = ()
    model_settings: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    micro_batches: int = 2

    def __post_init__(self) -> None:
        words = str(self.base.parent / "words")
        settings = ModelConfig(
            **{"base_model": str(self.base), "tokenizer": words, "lora_rank": 4, **self.model_settings}
        )
        self.family = resolve(settings, DataConfig())
        training = TrainingConfig(**{"learning_rate": 1e-3, **self.training})
        self.family.configure(training, DataConfig())
        self.plan = MemoryPlan(self.techniques)
        text = settings.train_text_encoder
        self.model = self.family.load_model(
            CPU, self.dtype, with_text=text, prepare=lambda m: self.plan.convert(m, self.family.blocks(m))
        )
        self.adapter = adapters.inject(self.model, self.family, settings, seed=0)
        with torch.no_grad():  # B = 0 would hide what A does
            for key, parameter in self.adapter.named_parameters().items():
                if "lora_B" in key:
                    parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(len(key)))
        self.plan.wrap(self.model, self.family.blocks(self.model))
        named = self.adapter.named_parameters()
        self.trainee = Trainee(
            family=self.family,
            model=self.model,
            params=list(named.values()),
            optimizer=self.plan.build_optimizer(param_groups(named, training), training),
            scaler=self.plan.scaler(),
            plan=self.plan,
            device=CPU,
            seed=0,
            max_grad_norm=training.max_grad_norm,
        )

    def batch(self, first: int) -> Batch:
        batch = self.family.example_batch(2, (64, 64))
        rng = torch.Generator().manual_seed(first)
        for name, value in batch.items():
            if name == "seeds":
                batch[name] = torch.arange(first, first + 2)
            elif name.startswith("input_ids"):
                batch[name] = torch.randint(0, 4, value.shape, generator=rng)
            elif name != "weight":
                batch[name] = torch.randn(value.shape, generator=rng)
        return batch

    def losses(self, steps: int = 2, first: int = 0) -> list[float]:
        count = self.micro_batches
        windows = (
            (step, [self.batch(2 * (count * step + i)) for i in range(count)]) for step in range(first, first + steps)
        )
        return [report.loss for report in train(self.trainee, windows, lambda step: 1.0 / (1 + step))]

    def state(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in self.adapter.state_dict().values()])


def compare(base: Path, *techniques: Technique, common: tuple[Technique, ...] = (), **settings: Any) -> tuple[Run, Run]:
    """Train with and without the techniques: losses to 1e-5, adapters to 1e-4."""
    plain, other = Run(base, common, **settings), Run(base, (*common, *techniques), **settings)
    start = plain.state()
    assert torch.equal(start, other.state())
    expected = plain.losses()
    assert other.losses() == pytest.approx(expected, rel=1e-5)
    assert (plain.state() - start).norm() > 1e-2
    assert (other.state() - plain.state()).abs().max() < 1e-4
    return plain, other


SETS = {
    "checkpointing": (CHECKPOINTING,),
    "streaming": (CHECKPOINTING, STREAMING),
    "half-streaming": (CHECKPOINTING, BlockStreaming(fraction=0.5, slots=3)),
    "one-slot": (CHECKPOINTING, BlockStreaming(slots=1)),
    "offload": (CHECKPOINTING, OFFLOAD),
    "all": (CHECKPOINTING, STREAMING, OFFLOAD),
}


@pytest.mark.parametrize("techniques", SETS.values(), ids=SETS)
@pytest.mark.parametrize("release", RELEASES)
def test_nothing_changes_a_number(bases, release, techniques):
    _, other = compare(bases[release], *techniques)
    assert recomputations(other.model) > 0


HARD = {
    "dora-dropout-conv": {"model_settings": {"dora": True, "lora_dropout": 0.3, "lora_targets": "all"}},
    "text-encoders": {"model_settings": {"train_text_encoder": True, "lora_dropout": 0.2}},
    "bf16": {
        "common": (BF16,),
        "dtype": torch.bfloat16,
        "model_settings": {"dora": True, "lora_dropout": 0.2, "lora_targets": "all"},
    },
    "4-bit": {"common": (Quantize4bit(), BF16), "dtype": torch.bfloat16},
    "8-bit": {"common": (Quantize8bit(),), "model_settings": {"dora": True, "lora_targets": "all"}},
    "fp8": {"common": (CastFp8(),)},
}


@pytest.mark.parametrize("settings", HARD.values(), ids=HARD)
@pytest.mark.parametrize("release", RELEASES)
def test_nothing_changes_a_number_in_hard_cases(bases, release, settings):
    """Quantised bases are compared with the same base quantised, not streamed."""
    _, other = compare(bases[release], *SETS["all"], **settings)
    report = streaming_report(other.model)
    assert report is not None
    assert report.loads > 2 * report.blocks


@pytest.mark.parametrize("mates", [(), *SETS.values()], ids=["alone", *SETS])
@pytest.mark.parametrize("release", RELEASES)
def test_optimizer_in_backward_changes_no_number(bases, release, mates):
    settings = {"micro_batches": 1, "training": {"max_grad_norm": 0.0}}
    _, other = compare(bases[release], *mates, OptimizerInBackward(), **settings)
    assert {p.grad for p in other.trainee.params} == {None}


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "came"])
def test_state_of_optimizer_in_backward_is_the_usual_one(bases, kind):
    """Saved by one kind of run, resumed by the other, it goes on as if nothing had happened."""
    if kind == "came":
        pytest.importorskip("pytorch_optimizer")
    settings = {"micro_batches": 1, "training": {"max_grad_norm": 0.0, "optimizer": kind}}
    straight = Run(bases["sd1"], **settings)
    expected = straight.losses(4)
    for first, second in (((), (OptimizerInBackward(),)), ((OptimizerInBackward(),), ())):
        before, after = Run(bases["sd1"], first, **settings), Run(bases["sd1"], second, **settings)
        losses = before.losses(2)
        after.adapter.load_state_dict(before.adapter.state_dict())
        after.trainee.optimizer.load_state_dict(before.trainee.optimizer.state_dict())
        assert losses + after.losses(2, first=2) == pytest.approx(expected, rel=1e-5)
        assert (after.state() - straight.state()).abs().max() < 1e-4


def test_gradient_norm_is_that_of_the_plain_run(bases):
    settings = {"micro_batches": 1, "training": {"max_grad_norm": 0.0}}
    plain, other = Run(bases["sd1"], **settings), Run(bases["sd1"], (OptimizerInBackward(),), **settings)
    for run in (plain, other):
        run.family.loss(run.model, run.batch(0)).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.trainee.params, float("inf")))
    assert isinstance(other.trainee.optimizer, InBackward)
    assert other.trainee.optimizer.grad_norm().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("release", RELEASES)
def test_previews_and_validation_between_steps(bases, release):
    """Forward passes without gradients, adapter on and off, harm neither their result nor the run."""
    plain, streamed = Run(bases[release]), Run(bases[release], SETS["all"])
    assert streamed.losses(1) == pytest.approx(plain.losses(1), rel=1e-5)
    for run in (plain, streamed):
        run.model.eval()
    with torch.no_grad(), plain.plan.step_context(), streamed.plan.step_context():
        assert torch.allclose(streamed.family.probe(streamed.model), plain.family.probe(plain.model), atol=1e-5)
        with plain.adapter.disabled(), streamed.adapter.disabled():
            base = streamed.family.probe(streamed.model)
            assert torch.allclose(base, plain.family.probe(plain.model), atol=1e-5)
        assert not torch.allclose(base, streamed.family.probe(streamed.model), atol=1e-3)
    assert streamed.losses(1, first=1) == pytest.approx(plain.losses(1, first=1), rel=1e-5)


@pytest.mark.parametrize("release", RELEASES)
def test_text_encoders_stream_while_captions_are_cached(bases, release):
    run = Run(bases[release])
    plain = run.family.load_text_encoders(CPU, torch.float32)
    streamed = run.family.load_text_encoders(CPU, torch.float32)
    layers = [layer for encoder in streamed.values() for layer in text_body(encoder).encoder.layers]
    BlockStreaming().wrap(streamed, [BlockGroup("text", layers)])
    for caption in ("a photo of a cat", "on red", ""):
        expected, got = run.family.encode_text(plain, [caption])[0], run.family.encode_text(streamed, [caption])[0]
        assert expected.keys() == got.keys()
        assert all(torch.allclose(got[name], expected[name], atol=1e-6) for name in got)
    report = streaming_report(streamed)
    assert report is not None
    assert report.blocks == len(layers)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_a_saved_file_is_verified_on_the_streamed_model(bases, tmp_path, release, dora):
    """The adapter is lifted out, diffusers' put in its place, and ours put back: training then goes on as if not."""
    plain, run = (Run(bases[release], techniques, {"dora": dora}) for techniques in ((), SETS["all"]))
    for each in (plain, run):
        each.losses(1)
    path = save_adapter(run.adapter, run.family, tmp_path / "lora.safetensors", "diffusers", "fp32", {})
    found = verify(run.model, run.adapter, run.family, path, run.family.probe)
    assert found.effect > 1e-3
    assert run.losses(1, first=1) == pytest.approx(plain.losses(1, first=1), rel=1e-5)
    assert (run.state() - plain.state()).abs().max() < 1e-4
