"""Streaming and offload on a card: the numbers of the plain run, no race, and copies that hide behind computation."""

import copy
import time

import pytest
import torch
from tiny_unets import ALL, TinyFamily, make_batch, make_model, trainable
from torch import nn

from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.seam.family import BlockGroup
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]
CHECKPOINTING = GradientCheckpointing()
SETS = {
    "streaming": (BlockStreaming(), CHECKPOINTING),
    "one-slot": (BlockStreaming(slots=1), CHECKPOINTING),
    "offload": (CHECKPOINTING, ActivationOffload(min_bytes=1)),
    "all": (BlockStreaming(slots=3), CHECKPOINTING, ActivationOffload(min_bytes=1)),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.shift)


class Chain(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def apply(model: Chain, *techniques: Technique) -> MemoryPlan:
    plan = MemoryPlan(techniques)
    plan.wrap(model, [BlockGroup("chain", list(model.blocks))])
    return plan


@pytest.mark.parametrize("techniques", SETS.values(), ids=SETS)
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_losses_and_gradients_are_those_of_the_plain_run(kind, techniques):
    family, found = TinyFamily(kind), []
    for plan in (MemoryPlan(()), MemoryPlan(techniques)):
        model = make_model(kind, ALL).to("cuda")
        plan.wrap(model, family.blocks(model))
        losses = []
        for step in range(3):
            batch = {name: x if name == "seeds" else x.cuda() for name, x in make_batch(2, first=2 * step).items()}
            with plan.step_context():
                loss = family.loss(model, batch)
            loss.backward()
            losses.append(loss.item())
        found.append((losses, torch.cat([p.grad.flatten() for p in trainable(model).values()])))
    (plain, gradient), (losses, other) = found
    assert losses == pytest.approx(plain, rel=1e-5)
    assert torch.allclose(other, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("techniques", SETS.values(), ids=SETS)
def test_no_race_over_many_steps(techniques):
    """Copies far longer than the computation beside them: whatever is not waited for would show."""
    torch.manual_seed(0)
    plain, x = Chain(8, 2048).cuda(), torch.randn(4, 2048, device="cuda")
    streamed = copy.deepcopy(plain)
    plan = apply(streamed, *techniques)
    plain(x).square().sum().backward()
    expected = torch.stack([block.shift.grad for block in plain.blocks])
    for _ in range(20):
        with plan.step_context():
            loss = streamed(x).square().sum()
        loss.backward()
        assert torch.allclose(torch.stack([b.shift.grad for b in streamed.blocks]), expected, rtol=1e-4, atol=1e-6)
        streamed.zero_grad()


def seconds(model: nn.Module, x: torch.Tensor, plan: MemoryPlan, steps: int = 8) -> float:
    for step in range(steps + 2):
        if step == 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with plan.step_context():
            loss = model(x).square().sum()
        loss.backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def test_copies_hide_behind_computation():
    width, count = 4096, 8
    model = Chain(count, width).cuda()
    block = torch.empty(width * width, pin_memory=True)
    target = block.cuda()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2 * (count - 2)):
        target.copy_(block, non_blocking=True)
    torch.cuda.synchronize()
    copying = time.perf_counter() - start
    x = torch.randn(1024, width, device="cuda")
    while (computing := seconds(model, x, apply(copy.deepcopy(model), CHECKPOINTING))) < copying:
        x = torch.cat([x, x])
    resident, streamed = copy.deepcopy(model), copy.deepcopy(model)
    computing = seconds(resident, x, apply(resident, CHECKPOINTING))
    took = seconds(streamed, x, apply(streamed, BlockStreaming(), CHECKPOINTING))
    report = streaming_report(streamed)
    assert report is not None
    assert report.late <= 2 * count
    assert took < computing + 0.5 * copying, f"computing {computing:.4f}, copying {copying:.4f}, together {took:.4f} s"
