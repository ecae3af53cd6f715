"""Predicted peaks against real ones: families x techniques x batch x resolution, on the CPU.

    python tests/bench/bench_accuracy.py [--only WORD] [--full-only]   the matrix, about ten minutes on two cores
    python tests/bench/bench_accuracy.py --full-sdxl                   one NF4 streamed step of the whole SDXL UNet, 512 px

Every case is simulated, then trained for two real optimizer steps under the same tracker (helpers/measured_run.py). Exit 1
if the median error is above 1 %, the worst above 3 %, or any case needs over 0.5 % more than was said. Beside the
full-size ones, each in a process of its own, the growth of the process's resident memory (device and host together).
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402
import torch  # noqa: E402
from helpers.measured_run import PHASES, Case, measure, predict, training_peak, write_base  # noqa: E402

from lora_trainer.engine.tracker import PhasePeak  # noqa: E402

MEDIAN, WORST, UNDER = 0.01, 0.03, 0.005
"""Limits of the relative error: of half the cases, of all, and downwards."""
MIB = 2**20

CHECKPOINTING = {"training": {"gradient_checkpointing": "yes"}}


def also(*parts: Mapping[str, Mapping[str, Any]], **memory: Any) -> dict[str, dict[str, Any]]:
    """Options of several sections laid over each other; keywords are of the section `memory`."""
    out: dict[str, dict[str, Any]] = {}
    for part in (*parts, {"memory": memory}):
        for section, values in part.items():
            out[section] = {**out.get(section, {}), **values}
    return out


ALL_TARGETS = {"model": {"lora_targets": "all"}}
TEXT = {"model": {"train_text_encoder": True}}
EIGHT_BIT = {"training": {"use_8bit_optimizer": "yes"}, "model": {"lora_rank": 64}}
ADAFACTOR = {"training": {"optimizer": "adafactor"}}
UNCLIPPED = {"training": {"max_grad_norm": 0.0}}
STREAMED = also(CHECKPOINTING, block_streaming=1.0)

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "fp32": ({"precision": "fp32"}, {}),
    "batch 4": ({"batch": 4}, {}),
    "accumulation 3": ({"batch": 2, "accumulation": 3}, {}),
    "384x256": ({"resolution": (384, 256)}, {}),
    "all targets": ({}, ALL_TARGETS),
    "text encoders": ({}, also(TEXT, CHECKPOINTING)),
    "checkpointing": ({}, CHECKPOINTING),
    "checkpointing fp32 b3": ({"precision": "fp32", "batch": 3}, CHECKPOINTING),
    "offload": ({"batch": 2, "resolution": (512, 512)}, also(CHECKPOINTING, activation_offload="yes")),
    "streamed 0.3": ({}, also(CHECKPOINTING, block_streaming=0.3)),
    "streamed": ({}, STREAMED),
    "streamed offload b4": ({"batch": 4}, also(STREAMED, activation_offload="yes")),
    "streamed dora all": ({}, also(STREAMED, {"model": {"lora_targets": "all", "dora": True}})),
    "nf4": ({}, also(base_quantization="nf4")),
    "nf4 checkpointing b2": ({"batch": 2}, also(CHECKPOINTING, base_quantization="nf4")),
    "nf4 streamed acc 2": ({"accumulation": 2}, also(STREAMED, base_quantization="nf4")),
    "int8 checkpointing": ({}, also(CHECKPOINTING, base_quantization="int8")),
    "int8 fp32 all": ({"precision": "fp32"}, also(ALL_TARGETS, base_quantization="int8")),
    "fp8 streamed 0.5": ({}, also(CHECKPOINTING, base_quantization="fp8", block_streaming=0.5)),
    "8-bit optimizer r64": ({}, also(CHECKPOINTING, EIGHT_BIT)),
    "adafactor all": ({}, also(CHECKPOINTING, ADAFACTOR, ALL_TARGETS)),
    "in backward r64": ({}, also(CHECKPOINTING, UNCLIPPED, {"model": {"lora_rank": 64}}, optimizer_in_backward="yes")),
    "everything": ({"batch": 2}, also(STREAMED, TEXT, activation_offload="yes", base_quantization="nf4")),
}
CASES = {
    f"{size} · {name}": Case(size, options=options, **shape)
    for size in ("sd15-narrow", "sdxl-narrow")
    for name, (shape, options) in VARIANTS.items()
}
FULL = {
    "sd15-full · plain": Case("sd15-full"),
    "sd15-full · checkpointing": Case("sd15-full", options=CHECKPOINTING),
    "sd15-full · streamed offload": Case("sd15-full", options=also(STREAMED, activation_offload="yes")),
    "sd15-full · nf4 streamed 0.3": Case(
        "sd15-full", options=also(CHECKPOINTING, base_quantization="nf4", block_streaming=0.3)
    ),
}


WHOLE_SDXL = Case("sdxl", (512, 512), options=also(STREAMED, {"model": {"lora_rank": 16}}, base_quantization="nf4"))


@dataclass(frozen=True)
class Row:
    """Bytes. `phases`: name -> predicted and real peak; `resident`: growth of the process in the real run."""

    name: str
    predicted: int
    real: int
    phases: dict[str, tuple[int, int]]
    host: tuple[int, int]
    seconds: tuple[float, float]
    resident: int | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1

    def phase_error(self, name: str) -> float:
        predicted, real = self.phases[name]
        return predicted / real - 1


def compare(name: str, case: Case, base: Path | None, *, resident: bool = False, steps: int = 2) -> Row:
    start = time.perf_counter()
    predicted = predict(case, base).phases
    gc.collect()
    middle = time.perf_counter()
    with growth() as grown:
        real = measure(case, base, steps).phases
    end = time.perf_counter()
    return Row(
        name,
        training_peak(predicted),
        training_peak(real),
        {phase: (predicted[phase].total, real[phase].total) for phase in PHASES},
        (_host(predicted), _host(real)),
        (middle - start, end - middle),
        grown[0] if resident else None,
    )


def _host(phases: Mapping[str, PhasePeak]) -> int:
    return max(phases[name].host for name in ("forward", "backward", "optimizer"))


@contextmanager
def growth() -> Iterator[list[int]]:
    """Of this process's resident memory, at its worst, looked at every 5 ms; in the list's first place at the end."""
    process, done, found = psutil.Process(), threading.Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.005):
            found[0] = max(found[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def rows(wanted: str, folder: Path, full: bool, narrow: bool) -> Iterator[Row]:
    if narrow:
        bases = {size: write_base(folder / size, size) for size in {case.size for case in CASES.values()}}
        for name, case in CASES.items():
            if wanted in name:
                yield compare(name, case, bases[case.size])
                gc.collect()
    names = [name for name in FULL if wanted in name] if full else []
    base = write_base(folder / "sd15-full", "sd15-full") if names else None
    for name in names:
        command = [sys.executable, __file__, "--one", name, "--base", str(base)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        raw = json.loads(done.stdout.splitlines()[-1])
        yield Row(**{**raw, "phases": {name: tuple(pair) for name, pair in raw["phases"].items()}})


def show(row: Row) -> None:
    phases = " ".join(f"{row.phase_error(name):+8.3%}" for name in PHASES)
    host = f"{row.host[0] / MIB:7.0f} {row.host[1] / MIB:7.0f}"
    rss = "" if row.resident is None else f"  RSS +{row.resident / MIB:.0f}"
    print(
        f"{row.name:38}{row.predicted / MIB:10.2f}{row.real / MIB:10.2f} {row.error:+8.3%} | {phases} | {host} |"
        f" {row.seconds[0]:4.1f} {row.seconds[1]:5.1f}{rss}",
        flush=True,
    )


def verdict(found: list[Row]) -> int:
    errors = [abs(row.error) for row in found]
    by_phase = [row.phase_error(name) for row in found for name in PHASES]
    median, worst, under = statistics.median(errors), max(errors), max(-row.error for row in found)
    print(
        f"\n{len(found)} case(s): median error {median:.4%}, worst {worst:.4%}, worst under-prediction {max(under, 0):.4%}"
    )
    print(
        f"by phase: median {statistics.median(map(abs, by_phase)):.4%}, from {min(by_phase):+.3%} to {max(by_phase):+.3%}"
    )
    return int(median > MEDIAN or worst > WORST or under > UNDER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds it")
    parser.add_argument("--full-only", action="store_true", help="the full-size ones alone")
    parser.add_argument("--narrow-only", action="store_true", help="without the full-size ones")
    parser.add_argument("--full-sdxl", action="store_true", help="one step of the whole SDXL UNet, NF4, streamed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        row = compare(arguments.one, FULL[arguments.one], Path(arguments.base), resident=True)
        print(json.dumps(asdict(row)))
        return 0
    heads = " ".join(f"{name:>8}" for name in PHASES)
    print(
        f"{'MiB':38}{'predicted':>10}{'real':>10} {'error':>8} | {heads} | {'host RAM: both':>15} | seconds", flush=True
    )
    if arguments.full_sdxl:
        row = compare("sdxl 512x512 · nf4 streamed r16", WHOLE_SDXL, None, resident=True, steps=1)
        show(row)
        return verdict([row])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(arguments.only, Path(folder), not arguments.narrow_only, not arguments.full_only):
            show(row)
            found.append(row)
    return verdict(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
