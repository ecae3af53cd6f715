"""Packed bases, loaded as a run loads them. Exact against a plain base that holds the rounded weights (losses 1e-5, adapters
1e-4), and within each technique's stated bound against the plain base."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.counts import recomputations
from helpers.original_checkpoint import write_single_file
from torch import Tensor, nn

from lora_trainer import adapters, families
from lora_trainer.config.declared import sharing
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.engine.packed import PackedConv2d, PackedLinear, packing_report
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.loop import Trainee, train
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.seam.family import Batch, Family
from lora_trainer.seam.technique import ConvertTechnique, Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques._quantizer import BASE
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.cast_fp8 import CastFp8
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.mixed_precision import MixedPrecision
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

CPU = torch.device("cpu")
BF16 = MixedPrecision("bf16", "cpu")
NF4, FP4, INT8, FP8 = Quantize4bit(), Quantize4bit("fp4", double=False), Quantize8bit(), CastFp8()
BASES: dict[str, tuple[ConvertTechnique, ...]] = {
    **{one.value: (one(),) for one in sharing(BASE.key)}, "fp4": (FP4,), "nf4+int8": (NF4, INT8),
}  # fmt: skip
"""Every technique that packs a base, by the name that the option gives it, and two variants."""
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
each_release = pytest.mark.parametrize("release", ["sd1", "sdxl"])


@pytest.fixture(scope="module")
def plain_run(family_of: Callable[[str], Family]) -> Callable[..., tuple[list[float], Tensor]]:
    """Losses and way of the plain base, made once for each set of arguments that `key` names."""
    made: dict[tuple[str, str], tuple[list[float], Tensor]] = {}

    def plain(release: str, key: str = "", **settings: object) -> tuple[list[float], Tensor]:
        if (release, key) not in made:
            family = family_of(release)
            made[release, key] = run(family, load(family, MemoryPlan(())), **settings)
        return made[release, key]

    return plain


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    opened: dict[str, Family] = {}

    def family(release: str) -> Family:
        if release not in opened:
            folder = tmp_path_factory.mktemp(release)
            write_single_file(folder / "base.safetensors", release)
            model = ModelConfig(base_model=str(folder / "base.safetensors"), tokenizer=str(folder / "words"))
            opened[release] = families.resolve(model, DataConfig())
        return opened[release]

    return family


def load(family: Family, plan: MemoryPlan, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    return family.load_model(CPU, dtype, prepare=lambda model: plan.convert(model, family.blocks(model)))


def rounded(family: Family, plan: MemoryPlan, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """The plain model with the weights that the packed one unpacks to."""
    plain, packed = load(family, MemoryPlan(()), dtype), load(family, plan, dtype)
    layers = dict(plain.named_modules())
    for name, layer in packed.named_modules():
        if isinstance(layer, (PackedLinear, PackedConv2d)):
            assert not torch.equal(layers[name].weight, layer.unpacked())
            layers[name].weight.copy_(layer.unpacked())
    return plain


def make_batch(family: Family, first: int, size: int = 2) -> Batch:
    """Random numbers in the shapes of the family's worst batch."""
    rng = torch.Generator().manual_seed(first)
    shapes = family.example_batch(size, (64, 64))
    drawn = {name: torch.randn(value.shape, generator=rng) for name, value in shapes.items()}
    return {**drawn, "weight": torch.ones(size), "seeds": torch.arange(first, first + size)}


def inject(model: nn.ModuleDict, family: Family, **settings: object) -> adapters.Adapter:
    adapter = adapters.inject(model, family, ModelConfig(lora_rank=4, **settings), seed=0)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:  # every weight has a gradient from the first step on
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=rng))
    return adapter


def flat(adapter: adapters.Adapter) -> Tensor:
    return torch.cat([value.flatten() for value in adapter.state_dict().values()])


def run(
    family: Family, model: nn.ModuleDict, *techniques: Technique, windows: list[list[Batch]] | None = None,
    rate: float = 1e-3, **settings: object,
) -> tuple[list[float], Tensor]:  # fmt: skip
    """Losses of the real loop, and how far the adapter went."""
    training, plan = TrainingConfig(learning_rate=rate), MemoryPlan(techniques)
    family.configure(training, DataConfig())
    adapter = inject(model, family, **settings)
    start, named = flat(adapter), adapter.named_parameters()
    plan.wrap(model, family.blocks(model))
    optimizer = plan.build_optimizer(param_groups(named, training), training)
    trainee = Trainee(family, model, list(named.values()), optimizer, plan.scaler(), plan, CPU, 0, 1.0)
    if windows is None:
        windows = [[make_batch(family, 4 * step), make_batch(family, 4 * step + 2)] for step in range(2)]
    losses = [report.loss for report in train(trainee, enumerate(windows), lambda step: 1.0)]
    return losses, flat(adapter) - start


# -- exact against the rounded weights

VARIANTS: dict[str, dict[str, object]] = {
    "all": {"lora_targets": "all"},
    "dora": {"dora": True, "lora_targets": "all"},
    "dora+dropout": {"dora": True, "lora_dropout": 0.3},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("release", "base"), [("sd1", (NF4, INT8)), ("sdxl", (FP8,))])
def test_a_packed_base_is_the_base_with_rounded_weights(family_of, release, base, settings):
    family, plan = family_of(release), MemoryPlan(base)
    losses, way = run(family, rounded(family, plan), **settings)
    found, packed_way = run(family, load(family, plan), **settings)
    assert found == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(packed_way, way, atol=1e-4)
    assert way.norm() > 1e-2


@pytest.mark.parametrize(
    ("release", "base"), [("sd1", (NF4,)), ("sd1", (INT8,)), ("sdxl", (NF4, INT8)), ("sdxl", (FP8,))]
)
def test_with_checkpointing_under_bf16(family_of, release, base):
    family, plan = family_of(release), MemoryPlan(base)
    settings = {"lora_targets": "all", "lora_dropout": 0.2}
    losses, way = run(family, rounded(family, plan, torch.bfloat16), BF16, **settings)
    model = load(family, plan, torch.bfloat16)
    found, packed_way = run(family, model, BF16, GradientCheckpointing(), **settings)
    assert found == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(packed_way, way, atol=1e-4)
    assert recomputations(model) > 0


@pytest.mark.parametrize(("release", "base"), [("sd1", (NF4, INT8)), ("sdxl", (FP8,))])
def test_streamed_and_offloaded(family_of, release, base):
    """DoRA too, which asks streamed layers for their weights."""
    family, streaming = family_of(release), BlockStreaming()
    settings = {"lora_targets": "all", "dora": True}
    losses, way = run(family, load(family, MemoryPlan(base)), **settings)
    model = load(family, MemoryPlan((*base, streaming)))
    others = (GradientCheckpointing(), ActivationOffload(min_bytes=256))
    found, streamed_way = run(family, model, streaming, *others, **settings)
    assert found == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(streamed_way, way, atol=1e-4)
    assert streaming_report(model).loads > streaming_report(model).blocks > 5


# -- the bound against the plain base: losses within 0.2 %, and the adapter's direction

LEAST_COSINE = {
    **{one.value: 1 - one.loses for one in sharing(BASE.key)},
    "nf4": 0.93, "fp4": 0.9, "int8": 0.995, "fp8": 0.97, "nf4+int8": 0.93,
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
@each_release
def test_bound_against_the_plain_base(family_of, plain_run, release, name):
    family, plan = family_of(release), MemoryPlan(BASES[name])
    model = load(family, plan)
    packed, left = packing_report(family.blocks(model))
    assert packed > left
    assert left == 0 or name in ("nf4", "fp4")
    losses, way = plain_run(release)
    found, packed_way = run(family, model)
    assert found == pytest.approx(losses, rel=2e-3)
    assert found != losses
    assert torch.cosine_similarity(packed_way, way, dim=0) > LEAST_COSINE[name]
    assert float(packed_way.norm()) == pytest.approx(float(way.norm()), rel=0.02)


@pytest.mark.parametrize("base", [(NF4,), (NF4, INT8), (FP8,)], ids=["nf4", "nf4+int8", "fp8"])
def test_it_learns_as_the_plain_base_does(family_of, plain_run, base):
    family = family_of("sd1")
    windows = [[make_batch(family, 0)]] * 20
    settings = {"windows": windows, "rate": 2e-2, "lora_targets": "all"}
    plain, _ = plain_run("sd1", "learning", **settings)
    losses, _ = run(family, load(family, MemoryPlan(base)), **settings)
    assert plain[-1] < 0.9 * plain[0]
    assert losses[0] - losses[-1] == pytest.approx(plain[0] - plain[-1], rel=0.1)


@each_release
def test_loading_never_holds_the_whole_base(family_of, release):
    family, plan = family_of(release), MemoryPlan((NF4, INT8))
    plain = load(family, MemoryPlan(()))
    sizes = [parameter.nbytes for parameter in plain.parameters()]
    with MemoryTracker() as tracker:
        model = load(family, plan)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    slack = 512 * len(sizes) * 2  # the tracker's rounding
    assert tracker.now <= held + slack
    assert tracker.peak <= held + 4 * max(sizes) + slack
    assert tracker.host_peak <= 2 * max(sizes) + 1024  # one being read, one being packed
    assert held < 0.4 * sum(sizes)


# -- the file


@each_base
@pytest.mark.parametrize(("release", "dora"), [("sd1", True), ("sdxl", False)])
def test_the_file_verifies_on_a_packed_base(family_of, release, base, dora, tmp_path: Path):
    family, plan = family_of(release), MemoryPlan(base)
    model = load(family, plan)
    adapter = inject(model, family, dora=dora)
    before = family.probe(model)
    kinds = [type(layer) for layer in model.modules()]
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    result = verify(model, adapter, family, path, family.probe)
    assert result.output_difference < 1e-4 < result.effect
    assert [type(layer) for layer in model.modules()] == kinds
    assert torch.equal(family.probe(model), before)
