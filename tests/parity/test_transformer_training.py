"""Every transformer family under every memory technique against the plain run; its files against its pipeline's loader."""

from functools import cache
from typing import Any

import pytest
import torch
from helpers.bases import NAMES, STORED, plain, written
from helpers.counts import recomputations
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer import adapters
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.transformer import TransformerFamily
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.errors import ConfigError, UserError
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.families import family_class, resolve
from lora_trainer.loop import Trainee, train
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.seam.family import Batch
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.cast_fp8 import CastFp8
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.mixed_precision import MixedPrecision
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward
from lora_trainer.techniques.optimizer_offload import OptimizerOffload
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

CPU = torch.device("cpu")
CHECKPOINTING, OFFLOAD = GradientCheckpointing(), ActivationOffload(min_bytes=1)
STREAMING, HALF = BlockStreaming(), BlockStreaming(fraction=0.5)
MOMENTS = OptimizerOffload()
BF16 = MixedPrecision("bf16", "cpu")


class Run:
    """Two optimizer steps of two micro-batches; `losses` and how far the adapter `moved`."""

    def __init__(self, options: dict[str, str], *techniques: Technique, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        settings = ModelConfig(**options, lora_rank=4, **{"lora_targets": "all", **more})
        family = resolve(settings, DataConfig())
        assert isinstance(family, TransformerFamily)
        training = TrainingConfig(learning_rate=1e-3, max_grad_norm=0.0)
        family.configure(training, DataConfig())
        self.family, plan = family, MemoryPlan(techniques)
        self.model = family.load_model(CPU, dtype, prepare=lambda m: plan.convert(m, family.blocks(m)))
        groups = family.blocks(self.model)
        self.adapter = adapters.inject(self.model, family, settings, seed=0, formats=("diffusers",))
        self._disturb()
        plan.wrap(self.model, groups)
        named = self.adapter.named_parameters()
        start = self._flat()
        trainee = Trainee(
            family, self.model, list(named.values()), plan.build_optimizer(param_groups(named, training), training),
            plan.scaler(), plan, CPU, 0, 0.0,
        )  # fmt: skip
        one = any(isinstance(technique, OptimizerInBackward) for technique in techniques)
        windows = ((step, [self._batch(2 * step), *([] if one else [self._batch(2 * step + 1)])]) for step in range(2))
        self.losses = [report.loss for report in train(trainee, windows, lambda step: 1.0)]
        self.moved = self._flat() - start

    @torch.no_grad()
    def _disturb(self) -> None:
        for key, parameter in self.adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.adapter.named_parameters().values()])

    def _batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        batch = self.family.example_batch(2, (64, 32))
        random = {k: torch.randn(v.shape, generator=generator) for k, v in batch.items() if v.is_floating_point() and k != "weight"}
        return {**batch, **random, "seeds": torch.tensor([2 * number, 2 * number + 1])}


LOSSLESS: dict[str, tuple[Technique, ...]] = {
    "checkpointing": (CHECKPOINTING,),
    "streaming": (CHECKPOINTING, STREAMING),
    "half streamed": (CHECKPOINTING, HALF),
    "offload": (CHECKPOINTING, OFFLOAD),
    "moments away": (CHECKPOINTING, MOMENTS),
    "all": (CHECKPOINTING, STREAMING, OFFLOAD, MOMENTS),
}


@cache
def plain_run(name: str) -> Run:
    return Run(plain(name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("techniques", LOSSLESS.values(), ids=LOSSLESS)
def test_a_technique_changes_no_number(name, techniques):
    run, expected = Run(plain(name), *techniques), plain_run(name)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert torch.allclose(run.moved, expected.moved, atol=1e-4)
    assert recomputations(run.model) > 0
    if any(isinstance(technique, BlockStreaming) for technique in techniques):
        report = streaming_report(run.model)
        assert report is not None
        assert report.loads >= report.blocks > 1


@pytest.mark.parametrize(("name", "kind"), STORED)
def test_a_stored_base_streams_without_a_change(name, kind):
    options = written(name, kind)[0]
    resident, streamed = Run(options), Run(options, CHECKPOINTING, STREAMING, OFFLOAD)
    assert streamed.losses == pytest.approx(resident.losses, rel=1e-5)
    assert torch.allclose(streamed.moved, resident.moved, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("techniques", "bound"),
    [((Quantize4bit(), Quantize8bit()), 0.1), ((Quantize8bit(),), 0.02), ((CastFp8(),), 0.05), ((Optimizer8bit(),), 1e-3)],
    ids=["nf4", "int8", "fp8", "8-bit optimizer"],
)  # fmt: skip
def test_a_quantiser_stays_within_its_bound(name, techniques, bound):
    run, expected = Run(plain(name), *techniques), plain_run(name)
    assert run.losses == pytest.approx(expected.losses, rel=bound)
    assert not torch.equal(run.moved, expected.moved)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_with_everything(name):
    mixed = Run(plain(name), BF16, CHECKPOINTING, STREAMING, OFFLOAD, dtype=torch.bfloat16)
    assert mixed.losses == pytest.approx(plain_run(name).losses, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_may_step_in_the_backward_pass(name):
    stepped = Run(plain(name), CHECKPOINTING, OptimizerInBackward())
    assert all(loss > 0 for loss in stepped.losses)
    assert stepped.moved.abs().max() > 0


FORMATS = [(name, layout) for name in NAMES for layout in family_class(name).formats]


@pytest.mark.parametrize(("name", "layout"), FORMATS)
@pytest.mark.parametrize("targets", ["attention", "attention+mlp", "all"])
def test_the_pipelines_loader_gives_the_trained_output(name, tmp_path, targets, layout):
    run = Run(plain(name), lora_targets=targets, lora_alpha=8)
    path = save_adapter(run.adapter, run.family, tmp_path / "x.safetensors", layout, "fp32", run.family.metadata())
    found = verify(run.model, run.adapter, run.family, path, run.family.probe)
    assert found.output_difference < 1e-4
    assert found.effect > 1e-3
    assert found.num_modules == len([m for m in run.model.modules() if hasattr(m, "lora_A")])


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_does_not_pass(name, tmp_path):
    run = Run(plain(name), lora_targets="attention")
    path = save_adapter(run.adapter, run.family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    tensors = load_file(path)
    key = next(key for key in tensors if "lora_B" in key)
    save_file({**tensors, key: tensors[key] * 1.5}, path)
    with pytest.raises(UserError):
        verify(run.model, run.adapter, run.family, path, run.family.probe)


@pytest.mark.parametrize("name", NAMES)
def test_presets_of_targets(name):
    family = resolve(ModelConfig(**plain(name)), DataConfig())
    model = family.load_model(torch.device("meta"), torch.float32)
    inside = {id(layer) for group in family.blocks(model) for block in group.blocks for layer in block.modules()}
    linears = {path for path, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside}
    found = {
        targets: set(adapters.find_targets(model, family, ModelConfig(lora_targets=targets), family.formats))
        for targets in ("auto", "attention", "attention+mlp", "all")
    }
    assert found["auto"] == found["attention"] < found["attention+mlp"] <= found["all"] <= linears
    assert len(found["attention"]) >= 4 * sum(len(group.blocks) for group in family.blocks(model) if not group.exact) * 0.7


@pytest.mark.parametrize("name", NAMES)
def test_dora_in_a_diffusers_file_and_not_in_a_fused_one(name, tmp_path):
    run = Run(plain(name), lora_targets="attention", dora=True)
    path = save_adapter(run.adapter, run.family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    assert verify(run.model, run.adapter, run.family, path, run.family.probe).output_difference < 1e-4
    if run.family.kohya_slots is not None:
        with pytest.raises(ConfigError, match="DoRA"):
            adapters.check_targets(run.family, ModelConfig(**plain(name), dora=True), ("diffusers", "kohya"))


@pytest.mark.parametrize(("name", "layout"), FORMATS)
def test_files_in_16_bits(name, layout, tmp_path):
    run = Run(plain(name), lora_targets="attention+mlp", lora_alpha=1)
    for precision in ("fp16", "bf16"):
        path = save_adapter(run.adapter, run.family, tmp_path / f"{precision}.safetensors", layout, precision, {})
        assert verify(run.model, run.adapter, run.family, path, run.family.probe).effect > 0
