"""Every technique against the plain run, on real UNets at tiny size; E03, E05 and E06 under each precision."""

from functools import partial

import pytest
import torch
from helpers.counts import recomputations
from tiny_unets import ALL, ATTENTION, TinyFamily, make_batch, make_model, trainable
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.loop import Trainee, train
from lora_trainer.machine.hardware import assert_trainable_float32
from lora_trainer.optim.optimizers import param_groups
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.mixed_precision import MixedPrecision
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit

BF16, FP16 = MixedPrecision(dtype="bf16", device="cpu"), MixedPrecision(dtype="fp16", device="cpu")
KINDS = ("sd15", "sdxl")


def run(kind: str, model: nn.ModuleDict, *techniques: Technique, steps: int = 3, rate: float = 1e-3) -> list[float]:
    """Losses of the real loop, two micro-batches a step; the model's adapter is left as trained."""
    family, settings, plan = TinyFamily(kind), TrainingConfig(learning_rate=rate), MemoryPlan(techniques)
    plan.wrap(model, family.blocks(model))
    named = trainable(model)
    assert_trainable_float32(model)
    trainee = Trainee(
        family=family,
        model=model,
        params=list(named.values()),
        optimizer=plan.build_optimizer(param_groups(named, settings), settings),
        scaler=plan.scaler(),
        plan=plan,
        device=torch.device("cpu"),
        seed=0,
        max_grad_norm=1.0,
    )
    windows = ((step, [make_batch(2, first=4 * step), make_batch(2, first=4 * step + 2)]) for step in range(steps))
    return [report.loss for report in train(trainee, windows, lambda step: 1.0)]


def adapter(model: nn.ModuleDict) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainable(model).values()])


# -- gradient checkpointing: lossless


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("targets", [ATTENTION, ALL], ids=["attention", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_number(kind, targets, every):
    plain, wrapped = make_model(kind, targets), make_model(kind, targets)
    losses = run(kind, plain)
    assert run(kind, wrapped, GradientCheckpointing(every=every)) == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(adapter(wrapped), adapter(plain), atol=1e-4)
    assert recomputations(wrapped) > 0
    assert recomputations(plain) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_with_dropout_and_dora(kind):
    changes = {"lora_dropout": 0.3, "use_dora": True}
    plain, wrapped = make_model(kind, **changes), make_model(kind, **changes)
    assert run(kind, wrapped, GradientCheckpointing()) == pytest.approx(run(kind, plain), rel=1e-5)
    assert torch.allclose(adapter(wrapped), adapter(plain), atol=1e-4)


def kept_bytes(kind: str, *techniques: Technique, targets: str = ATTENTION, **model: object) -> dict[torch.dtype, int]:
    """Bytes autograd keeps for the backward pass besides weights, by dtype, each storage once."""
    family, plan, net = TinyFamily(kind), MemoryPlan(techniques), make_model(kind, targets, **model)
    plan.wrap(net, family.blocks(net))
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, tuple[torch.dtype, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (tensor.dtype, storage.nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), plan.step_context():
        loss = family.loss(net, make_batch(2))
    loss.backward()
    totals: dict[torch.dtype, int] = {}
    for dtype, size in kept.values():
        totals[dtype] = totals.get(dtype, 0) + size
    return totals


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_keeps_far_less(kind):
    plain = sum(kept_bytes(kind).values())
    assert sum(kept_bytes(kind, GradientCheckpointing()).values()) < 0.5 * plain
    assert sum(kept_bytes(kind, GradientCheckpointing(every=2)).values()) < 0.9 * plain


def test_without_gradients_nothing_is_recomputed():
    family, model = TinyFamily("sd15"), make_model("sd15")
    GradientCheckpointing().wrap(model, family.blocks(model))
    with torch.no_grad():
        family.loss(model, make_batch(1))
    assert recomputations(model) == 0


def test_wrapping_a_block_twice_is_a_bug():
    family, model = TinyFamily("sd15"), make_model("sd15")
    GradientCheckpointing().wrap(model, family.blocks(model))
    with pytest.raises(AssertionError, match="twice"):
        GradientCheckpointing().wrap(model, family.blocks(model))


# -- mixed precision, on a base stored in 16 bits: losses within 0.2 %, the adapter's way within 20 %


@pytest.mark.parametrize(("technique", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_stays_within_its_bound(kind, technique, dtype):
    plain, mixed = make_model(kind, ALL), make_model(kind, ALL, dtype=dtype)
    start = adapter(plain).clone()
    losses = run(kind, plain)
    assert run(kind, mixed, technique) == pytest.approx(losses, rel=2e-3)
    moved, reference = adapter(mixed) - start, adapter(plain) - start
    assert (moved - reference).norm() / reference.norm() < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_under_mixed_precision_changes_no_number(kind):
    changes = {"dtype": torch.bfloat16, "lora_dropout": 0.2, "use_dora": True}
    plain, both = make_model(kind, **changes), make_model(kind, **changes)
    losses = run(kind, plain, BF16)
    assert run(kind, both, BF16, GradientCheckpointing()) == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(adapter(both), adapter(plain), atol=1e-4)
    assert recomputations(both) > 0


def test_no_float32_copies_of_activations():
    """peft's cast would keep one of every adapted layer's input."""
    kept = kept_bytes("sd15", BF16, targets=ALL, dtype=torch.bfloat16)
    net = make_model("sd15", ALL, dtype=torch.bfloat16)
    with_peft_cast: dict[str, torch.dtype] = {}
    for name, module in net.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(partial(_note_dtype, with_peft_cast, name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        TinyFamily("sd15").loss(net, make_batch(2))
    assert set(with_peft_cast.values()) == {torch.float32}, "the hazard is gone: drop the technique's hook"
    assert kept[torch.float32] < 0.2 * kept[torch.bfloat16]


def _note_dtype(seen: dict[str, torch.dtype], name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    seen[name] = args[0].dtype


@pytest.mark.parametrize("technique", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_e05_layers_really_compute_in_the_precision_asked(technique):
    wanted = {None: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}[technique]
    family, model = TinyFamily("sd15"), make_model("sd15", ALL, dtype=wanted)
    plan = MemoryPlan((technique,) if technique else ())
    plan.wrap(model, family.blocks(model))
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(partial(_note_output, seen, name))
    with plan.step_context():
        family.loss(model, make_batch(1)).backward()
    assert len(seen) > 50
    assert set(seen.values()) == {wanted}


def _note_output(seen: dict[str, torch.dtype], name: str, module: nn.Module, args: object, out: torch.Tensor) -> None:
    seen[name] = out.dtype


def test_outside_autocast_the_wrapped_model_still_answers():
    family, model = TinyFamily("sd15"), make_model("sd15", ALL, dtype=torch.bfloat16)
    MemoryPlan((BF16,)).wrap(model, family.blocks(model))
    batch = make_batch(1)
    batch["prompt_embeds"] = batch["prompt_embeds"].bfloat16()
    with torch.no_grad():
        assert family.predict(model, batch["latents"].bfloat16(), torch.tensor([10]), batch).isfinite().all()


# -- E03, E06: the trained weights are float32, so small updates are not lost


@pytest.fixture(scope="module")
def float32_walk() -> tuple[torch.Tensor, torch.Tensor]:
    """Start and displacement of fifty steps at a learning rate of 1e-5."""
    model = make_model("sd15")
    start = adapter(model).clone()
    run("sd15", model, steps=50, rate=1e-5)
    return start, adapter(model) - start


@pytest.mark.parametrize(("technique", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=["bf16", "fp16"])
def test_e06_fifty_small_updates_survive(float32_walk, technique, dtype):
    start, reference = float32_walk
    model = make_model("sd15", dtype=dtype)
    run("sd15", model, technique, steps=50, rate=1e-5)
    moved = adapter(model) - start
    assert moved.norm().item() == pytest.approx(reference.norm().item(), rel=0.05)
    assert (moved - reference).norm() / reference.norm() < 0.05
    # The hazard: weights held in 16 bits would have stayed where they were, or jumped.
    held = (start.to(dtype) + reference.to(dtype)).float() - start.to(dtype).float()
    assert (held - reference).norm() / reference.norm() > 0.05


@pytest.mark.parametrize("technique", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_e03_trainable_weights_stay_float32(technique):
    model = make_model("sdxl", dtype=torch.float16 if technique is FP16 else torch.float32)
    run("sdxl", model, *([technique] if technique else []), steps=1)
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    assert {p.grad for p in trainable(model).values()} == {None}


def test_only_fp16_scales_its_loss():
    assert MemoryPlan((FP16,)).scaler().is_enabled()
    assert not MemoryPlan((BF16,)).scaler().is_enabled()
    assert not MemoryPlan(()).scaler().is_enabled()


# -- 8-bit optimizer: the adapter's way within 5 %


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_8_bit_optimizer_stays_within_its_bound(kind, paged):
    plain, small = (make_model(kind, r=256) for _ in range(2))  # matrices of 4096 elements and more
    start = adapter(plain).clone()
    losses = run(kind, plain, steps=5)
    assert run(kind, small, Optimizer8bit(paged=paged), steps=5) == pytest.approx(losses, rel=1e-3)
    moved, reference = adapter(small) - start, adapter(plain) - start
    assert 1e-3 < (moved - reference).norm() / reference.norm() < 0.05


def test_8_bit_optimizer_follows_the_name_written():
    named = trainable(make_model("sd15"))
    for written, paged, built in (
        ("adamw", False, "AdamW8bit"),
        ("adamw", True, "PagedAdamW8bit"),
        ("lion8bit", True, "Lion8bit"),
    ):
        settings = TrainingConfig(optimizer=written)
        optimizer = Optimizer8bit(paged).build(param_groups(named, settings), settings)
        assert type(optimizer).__name__ == built
