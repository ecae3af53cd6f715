"""What streaming and offload cost in time and save in memory: one full-size SD 1.5 UNet step, on a card or the CPU.

    python tests/bench/bench_streaming.py [pixels a side, default 256] [steps, default 2]

Random bf16 weights, LoRA rank 8 on attention, batch 1. On the CPU copies compete with the computation for the same
memory, so the overhead is that of copying everything once and a half; on a card it should be near nothing.
"""

import gc
import sys
import time

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lora_trainer.bases.architecture import shipped
from lora_trainer.diffusion.unet import block_groups
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.engine.tracker import MemoryTracker, host_memory
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHECKPOINTING = GradientCheckpointing()
PLANS: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "checkpointing": (CHECKPOINTING,),
    "half streamed": (CHECKPOINTING, BlockStreaming(fraction=0.5)),
    "streamed": (CHECKPOINTING, BlockStreaming()),
    "streamed, offload": (CHECKPOINTING, BlockStreaming(), ActivationOffload()),
}


def build(plan: MemoryPlan) -> nn.ModuleDict:
    """On meta first, so that streamed layers are filled in host memory."""
    with torch.device("meta"):
        model = nn.ModuleDict({"unet": UNet2DConditionModel.from_config(shipped("sd1", "unet"))}).to(torch.bfloat16)
    model.requires_grad_(False)
    plan.convert(model, block_groups(model))
    inject_adapter_in_model(LoraConfig(r=8, target_modules=r".*attn\d\.(to_q|to_k|to_v|to_out\.0)"), model)
    for module in model.modules():
        home = getattr(module, "home", DEVICE)
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            dtype = torch.float32 if old.requires_grad else old.dtype
            with host_memory(hasattr(module, "home")):
                value = torch.empty(old.shape, dtype=dtype, device=home)
            value.fill_(1.0) if old.ndim == 1 else value.normal_(std=0.02)
            module._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    plan.wrap(model, block_groups(model))
    return model


def step(model: nn.ModuleDict, plan: MemoryPlan, side: int) -> None:
    with plan.step_context(), torch.autocast(DEVICE.type, torch.bfloat16):
        x = torch.randn(1, 4, side // 8, side // 8, device=DEVICE)
        text = torch.randn(1, 77, 768, device=DEVICE, dtype=torch.bfloat16)
        predicted = model["unet"](x.bfloat16(), torch.tensor([5], device=DEVICE), text).sample
        loss = nn.functional.mse_loss(predicted.float(), x)
    loss.backward()


def measure(techniques: tuple[Technique, ...], side: int, steps: int) -> tuple[float, int, int, int]:
    """Seconds a step; device and host bytes at their peaks, and bytes copied, in a step of its own under the tracker."""
    plan = MemoryPlan(techniques)
    with MemoryTracker() as tracker:
        model = build(plan)
        step(model, plan, side)
        tracker.peak, tracker.transferred = tracker.now, 0
        step(model, plan, side)
    start = time.perf_counter()
    for _ in range(steps):
        step(model, plan, side)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    report = streaming_report(model)
    if report is not None:
        print(
            f"    {report.blocks} blocks, ring {report.ring_bytes / 2**20:.0f} MiB, late {report.late}/{report.loads}"
        )
    return seconds, tracker.peak, tracker.host_peak, tracker.transferred


def main(side: int = 256, steps: int = 2) -> None:
    print(f"{DEVICE}, {side} px\n{'':20}{'s/step':>9}{'device MiB':>12}{'host MiB':>11}{'copied MiB':>12}")
    for name, techniques in PLANS.items():
        seconds, device, host, copied = measure(techniques, side, steps)
        print(f"{name:20}{seconds:9.2f}{device / 2**20:12.0f}{host / 2**20:11.0f}{copied / 2**20:12.0f}", flush=True)
        gc.collect()


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
