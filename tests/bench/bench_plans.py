"""Does the step-time model put plans in the order that a clock does?  python tests/bench/bench_plans.py [rounds]

The planner ranks plans by counted FLOPs and copied bytes (machine/speed.py). Here some plans of one reduced UNet are set up
side by side and stepped in turns, so that a busy machine slows them alike; the least time of each counts. Printed: predicted
and measured seconds, Spearman's and Kendall's rank correlations. Pairs that the model holds equal (within 2 %) are left out
of Kendall's. On a CPU, copies take time from computing and packed weights are slow to unpack, as on no card.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from helpers.measured_run import Case, predict, random_batch, set_up, write_base  # noqa: E402

from lora_trainer import loop  # noqa: E402
from lora_trainer.machine.speed import speed_of  # noqa: E402

CHECKPOINTING = {"training": {"gradient_checkpointing": "yes"}}
PLANS: dict[str, dict[str, Any]] = {
    "resident": {},
    "checkpointing": CHECKPOINTING,
    "streamed 0.5": {**CHECKPOINTING, "memory": {"block_streaming": 0.5}},
    "streamed": {**CHECKPOINTING, "memory": {"block_streaming": 1.0}},
    "streamed, offload": {**CHECKPOINTING, "memory": {"block_streaming": 1.0, "activation_offload": "yes"}},
    "nf4, no checkpointing": {"memory": {"base_quantization": "nf4"}},
    "nf4, checkpointing": {**CHECKPOINTING, "memory": {"base_quantization": "nf4"}},
}
SAME = 0.02


def steps(case: Case, base: Path) -> Iterator[float]:
    """Seconds of one optimizer step after the other."""
    family, config = case.open(base)
    trainee = set_up(case, family, config, base.parent).trainee()
    batch = random_batch(family, case)
    reports = loop.train(trainee, ((step, [batch]) for step in itertools.count()), lambda step: 1.0)
    while True:
        start = time.perf_counter()
        next(reports)
        yield time.perf_counter() - start


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    ranks = [_ranks(left), _ranks(right)]
    return float(torch.corrcoef(torch.tensor(ranks, dtype=torch.float64))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the mean of their places."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def kendall(left: Sequence[float], right: Sequence[float]) -> tuple[float, int]:
    """Share of pairs in the same order less that in the other, and the number of pairs that `left` tells apart."""
    pairs = [
        (left[i] - left[j]) * (right[i] - right[j])
        for i, j in itertools.combinations(range(len(left)), 2)
        if abs(left[i] - left[j]) > SAME * max(left[i], left[j])
    ]
    return sum(1 if pair > 0 else -1 for pair in pairs) / max(1, len(pairs)), len(pairs)


def main(rounds: int = 5) -> None:
    torch.set_num_threads(1)
    speed = speed_of(None)
    with tempfile.TemporaryDirectory() as folder:
        base = write_base(Path(folder), "sdxl-narrow")
        cases = {name: Case("sdxl-narrow", (256, 256), batch=2, options=options) for name, options in PLANS.items()}
        costs = [predict(case, base) for case in cases.values()]
        predicted = [speed.seconds(cost.flops, cost.transferred) for cost in costs]
        clocks = [steps(case, base) for case in cases.values()]
        taken = [[next(clock) for clock in clocks] for _ in range(rounds + 1)][1:]
    measured = [min(times) for times in zip(*taken, strict=True)]
    print(f"{'':24}{'predicted s':>12}{'measured s':>12}{'GFLOP':>9}{'copied MiB':>12}")
    for name, guess, real, cost in zip(PLANS, predicted, measured, costs, strict=True):
        print(f"{name:24}{guess:12.3f}{real:12.3f}{cost.flops / 1e9:9.1f}{cost.transferred / 2**20:12.1f}")
    tau, pairs = kendall(predicted, measured)
    print(f"Spearman {spearman(predicted, measured):.2f}, Kendall {tau:.2f} over {pairs} pairs told apart")
    print(f"fastest: predicted {_first(predicted)}, measured {_first(measured)}")


def _first(seconds: Sequence[float]) -> str:
    return list(PLANS)[min(range(len(seconds)), key=seconds.__getitem__)]


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
