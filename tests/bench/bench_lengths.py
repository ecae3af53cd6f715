"""The longest text that fits a card: Llama-3.1-8B in NF4, LoRA of rank 32, batch 1.  python tests/bench/bench_lengths.py

Peaks are simulated, contexts and slack as allowance.py has them. Beside them, the lengths that Unsloth publishes for the same
model and rank (README of 2025-08). Peaks grow with length in a straight line, so a length is worked out from two
simulations and settled by more.
"""

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from lora_trainer.config.loading import load  # noqa: E402
from lora_trainer.families import resolve  # noqa: E402
from lora_trainer.machine.allowance import base_allowance  # noqa: E402
from lora_trainer.machine.hardware import Precision  # noqa: E402
from lora_trainer.planner import plan  # noqa: E402
from lora_trainer.planner.plan import Planner  # noqa: E402
from lora_trainer.planner.simulate import Shape  # noqa: E402
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit  # noqa: E402

GIB = 2**30
PUBLISHED = {8: 2972, 12: 21848, 16: 40724, 24: 78475}
RESIDENT = {plan.QUANTIZATION: "nf4", Optimizer8bit.key: "yes", plan.CHECKPOINTING: "yes", plan.OFFLOAD: "yes"}
MODES = {
    "streamed, embeddings away": {**RESIDENT, plan.EMBEDDINGS: "yes", plan.STREAMING: 1.0},
    "embeddings away": {**RESIDENT, plan.EMBEDDINGS: "yes"},
    "resident": RESIDENT,
}
SETTINGS = ["modelo.arquitetura=llama-3.1-8b", "modelo.classificacao_lora=32", "memoria.quantizacao_base=nf4"]
PROBES = (2048, 32768)


@cache
def peak(mode: str, length: int) -> tuple[int, int]:
    """(bytes on the card, bytes in host memory)."""
    config = load(None, SETTINGS, required=()).config
    family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)
    precision = Precision(torch.bfloat16, torch.bfloat16, scaler=False)
    planner = Planner(family, config, precision, Shape(1, (length, 1)), None)
    found = planner.simulate({**planner.nothing, **MODES[mode]})
    return found.peak, max(phase.host for phase in found.prediction.phases.values())


def longest(mode: str, available: int) -> int:
    low, high = (peak(mode, length)[0] for length in PROBES)
    a_token = (high - low) / (PROBES[1] - PROBES[0])
    length = int(PROBES[0] + (available - low) / a_token)
    while peak(mode, length)[0] > available:
        length -= max(8, int((peak(mode, length)[0] - available) / a_token))
    return length


def main() -> None:
    for mode in MODES:
        for card, published in PUBLISHED.items():
            length = longest(mode, base_allowance(None).for_tensors(card * GIB))
            total, host = peak(mode, length)
            numbers = f"{length:7,} tokens (published {published:6,}), tensors {total / GIB:5.2f} GiB, RAM {host / GIB:4.1f}"
            print(f"{mode:26}{card:3} GB: {numbers}", flush=True)


if __name__ == "__main__":
    main()
