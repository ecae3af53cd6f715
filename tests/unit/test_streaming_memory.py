"""What streaming, checkpointing and offload take off the device, on real and on fake tensors, under the tracker."""

import pytest
import torch
from helpers.counts import streamable_bytes
from tiny_unets import TinyFamily, make_batch, make_model, trainable
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.engine.block_streaming import ring_buffers, streaming_report
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward

STREAMING, CHECKPOINTING = BlockStreaming(), GradientCheckpointing()


def device_peaks(*techniques: Technique, kind: str, fake: bool) -> MemoryTracker:
    """Two real steps of a real UNet; weights counted as the simulation does."""
    model, family, plan = make_model(kind), TinyFamily(kind), MemoryPlan(techniques)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = make_batch(2)
    batch["latents"] = torch.zeros(2, 4, 16, 16)
    if fake:
        convert = mode.from_tensor
        for module in model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = nn.Parameter(convert(value.detach()), requires_grad=value.requires_grad)
    with mode if fake else torch.random.fork_rng(), MemoryTracker() as tracker:
        plan.wrap(model, family.blocks(model))
        tracker.mark((x for x in (*model.parameters(), *model.buffers())), "frozen")
        named = trainable(model)
        groups = [{"params": list(named.values()), "lr": 1e-3, "base_lr": 1e-3}]
        optimizer = plan.build_optimizer(groups, TrainingConfig(max_grad_norm=0.0))
        for _ in range(2):
            tracker.transferred = 0
            with plan.step_context():
                loss = family.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        resident = ring_buffers(model)
        assert sum(b.nbytes for b in resident) == (streaming_report(model).ring_bytes if resident else 0)
    return tracker


ALL_TOGETHER = (STREAMING, CHECKPOINTING, ActivationOffload(min_bytes=1024), OptimizerInBackward())


@pytest.mark.parametrize(
    ("kind", "techniques"),
    [("sd15", (CHECKPOINTING,)), ("sd15", (STREAMING, CHECKPOINTING)), ("sdxl", ALL_TOGETHER)],
    ids=["checkpointing", "streaming", "all"],
)
def test_fake_tensors_take_as_much_as_real_ones(kind, techniques):
    real, fake = (device_peaks(*techniques, kind=kind, fake=fake) for fake in (False, True))
    assert fake.peak == pytest.approx(real.peak, rel=2e-3)
    assert fake.host_peak == pytest.approx(real.host_peak, rel=2e-2)
    assert fake.transferred == real.transferred


def test_each_technique_takes_its_share_off_the_device():
    offload = ActivationOffload(min_bytes=1024)
    sets = {
        "plain": (),
        "checkpointing": (CHECKPOINTING,),
        "half": (BlockStreaming(fraction=0.5), CHECKPOINTING),
        "streaming": (STREAMING, CHECKPOINTING),
        "everything": (STREAMING, CHECKPOINTING, offload),
    }
    plain, checkpointing, half, streaming, everything = (
        device_peaks(*techniques, kind="sd15", fake=False) for techniques in sets.values()
    )
    assert checkpointing.peak < 0.9 * plain.peak
    assert everything.peak < streaming.peak < half.peak < checkpointing.peak
    model = make_model("sd15")
    groups = TinyFamily("sd15").blocks(model)
    total = streamable_bytes(groups)
    MemoryPlan((STREAMING, CHECKPOINTING)).wrap(model, groups)
    ring = sum(buffer.nbytes for buffer in ring_buffers(model))
    assert checkpointing.peak - streaming.peak == pytest.approx(total - ring, rel=0.05)
    assert streaming.host_peak == pytest.approx(total, rel=0.05)
    assert 1.5 * total < streaming.transferred <= 2 * total
