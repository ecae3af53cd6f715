"""All that only a card can tell, in one go of under eight minutes:  python tests/gpu/measure.py [--minutes 8] [--plan-only]

For SD 1.5 at 512 and SDXL at 1024 pixels, under a memory fraction of 4, 6, 8, 12 and 24 GiB: the plan that the planner picks, made
for real with random weights; its predicted peak against max_memory_allocated and max_memory_reserved, its predicted time
against the clock. Then what streaming costs, a run that really runs out of memory, and the parts of machine/allowance.py as a
line to put there. What the time does not suffice for is named. Without a card only the plans are made.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]

import torch  # noqa: E402
from helpers.measured_run import Case, random_batch, set_up  # noqa: E402

from lora_trainer import loop  # noqa: E402
from lora_trainer.machine.allowance import MIB, Allowance, base_allowance  # noqa: E402
from lora_trainer.machine.cap import cap_process  # noqa: E402
from lora_trainer.machine.card import Card, read_card  # noqa: E402
from lora_trainer.machine.hardware import Precision, choose_precision  # noqa: E402
from lora_trainer.machine.speed import speed_of  # noqa: E402
from lora_trainer.planner.foresee import named  # noqa: E402
from lora_trainer.planner.plan import CHECKPOINTING, STREAMING, Planner, with_values  # noqa: E402
from lora_trainer.planner.simulate import Shape  # noqa: E402
from lora_trainer.techniques.block_streaming import streaming_report  # noqa: E402
from lora_trainer.units import GIB  # noqa: E402

AUTO = {
    "model": {"lora_rank": 16},
    "training": {"gradient_checkpointing": "auto", "use_8bit_optimizer": "auto", "learning_rate": 1e-4},
}
CASES = {
    "sd15": Case("sd15", (512, 512), batch=1, options=AUTO),
    "sdxl": Case("sdxl", (1024, 1024), batch=1, options=AUTO),
}
JOBS = [("sdxl", 8), ("sd15", 4), ("sdxl", 4), ("sdxl", 24), ("sd15", 6), ("sdxl", 6), ("sdxl", 12), ("sd15", 8), ("sd15", 24),
        ("sd15", 12)]  # fmt: skip
"""Family and GiB, the most telling first."""
SECONDS = {"sd15": 25.0, "sdxl": 60.0}
"""A guess at what a job takes, planning included."""
STEPS = 4


@dataclass
class Result:
    """Bytes and seconds; what is None was not measured."""

    name: str
    plan: dict[str, Any]
    fits: bool
    predicted: int
    predicted_load: int
    predicted_reserved: int
    predicted_seconds: float
    planning_seconds: float
    allocated: int | None = None
    allocated_load: int | None = None
    reserved: int | None = None
    context: int | None = None
    seconds: float | None = None
    late: tuple[int, int] | None = None
    """Copies that a block waited for, of all."""


@dataclass
class Bench:
    """`deadline` by time.monotonic; results and what was left out gather here."""

    device: torch.device
    deadline: float
    card: Card | None
    allowance: Allowance
    precision: Precision
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def within(self, name: str, seconds: float, part: Callable[[], None]) -> None:
        """Run a part if there is time for it; its failure is told, and the next part goes on."""
        if time.monotonic() + seconds > self.deadline:
            self.left_out.append(name)
            return
        try:
            part()
        except Exception:
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


# -- plans, and runs of them


def job(bench: Bench, family_name: str, gib: int, *, run: bool, forced: dict[Any, Any] | None = None) -> Result:
    case, start = CASES[family_name], time.perf_counter()
    family, config = case.open(None)
    available = bench.allowance.for_tensors(gib * GIB)
    shape = Shape(case.batch, case.resolution, previews=False)
    planner = Planner(family, config, bench.precision, shape, available)
    best = planner.simulate({**planner.solve().values, **forced}) if forced else planner.solve()
    phases, speed = best.prediction.phases, speed_of(bench.card, None if bench.card else gib)
    peak = max(phases[name].total for name in ("forward", "backward", "optimizer"))
    result = Result(
        f"{family_name} {gib} GiB" + (" forced" if forced else ""),
        {key: value for key, value in named(best.values).items() if value not in ("no", None)},
        best.fits(available),
        peak,
        phases["load"].total,
        bench.allowance.reserved(peak),
        speed.seconds(best.prediction.flops, best.prediction.transferred),
        time.perf_counter() - start,
    )
    if run and (result.fits or forced):
        limit = gib * GIB - bench.allowance.context
        real(bench, case, family, with_values(config, best.values), limit, result)
    bench.results.append(result)
    show(result)
    return result


def real(bench: Bench, case: Case, family: Any, config: Any, limit: int, result: Result) -> None:
    device, cuda = bench.device, torch.cuda
    cap_process(device, limit)
    try:
        cuda.reset_peak_memory_stats(device)
        with tempfile.TemporaryDirectory() as folder:
            setup = set_up(case, family, config, Path(folder), device, bench.precision)
            result.allocated_load = cuda.max_memory_allocated(device)
            batch = random_batch(family, case)
            reports = loop.train(setup.trainee(), ((step, [batch]) for step in range(STEPS)), lambda step: 1.0)
            next(reports)
            cuda.reset_peak_memory_stats(device)
            cuda.synchronize(device)
            start = time.perf_counter()
            losses = [report.loss for report in reports]
            cuda.synchronize(device)
            result.seconds = (time.perf_counter() - start) / len(losses)
            result.allocated, result.reserved = cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)
            free, total = cuda.mem_get_info(device)
            others = (bench.card.total - bench.card.free) if bench.card and not bench.card.context_made else 0
            result.context = total - free - cuda.memory_reserved(device) - others
            report = streaming_report(setup.model)
            result.late = (report.late, report.loads) if report else None
            setup.drop()
    finally:
        cuda.set_per_process_memory_fraction(1.0, device)


def show(result: Result) -> None:
    words = ", ".join(f"{key.partition('.')[2]}={value}" for key, value in result.plan.items()) or "all resident"
    verdict = "fits" if result.fits else "does not fit"
    print(
        f"{result.name:16} {verdict}; {words}; planned in {result.planning_seconds:.1f} s\n"
        f"    tensors at the peak {_mib(result.predicted)}, loading {_mib(result.predicted_load)}; "
        f"reserve {_mib(result.predicted_reserved)}; {result.predicted_seconds:.2f} s/step",
        flush=True,
    )
    if result.allocated is not None and result.reserved is not None:
        error = result.predicted / result.allocated - 1
        late = "" if result.late is None else f"; copies waited for {result.late[0]}/{result.late[1]}"
        print(
            f"    really              {_mib(result.allocated)} ({error:+.2%}), loading {_mib(result.allocated_load)}; "
            f"reserve {_mib(result.reserved)}; {result.seconds:.2f} s/step; context {_mib(result.context)}{late}",
            flush=True,
        )


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:8.1f} MiB"


# -- what streaming costs


def overlap(bench: Bench) -> None:
    """The same model resident and wholly streamed, with room for both; beside it what a bare copy sustains."""
    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(256 * MIB, dtype=torch.uint8, device=bench.device)
    device.copy_(host)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    print(
        f"pinned host to device: {8 * host.nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s (for speed.LINK_BYTES)"
    )
    del host, device
    resident = job(bench, "sdxl", 24, run=True, forced={CHECKPOINTING: "yes", STREAMING: "no"})
    streamed = job(bench, "sdxl", 24, run=True, forced={CHECKPOINTING: "yes", STREAMING: 1.0})
    if resident.seconds and streamed.seconds and resident.allocated and streamed.allocated:
        saved = resident.allocated - streamed.allocated
        print(f"streaming SDXL: {streamed.seconds / resident.seconds:.2f} times the time, {_mib(saved)} less")


# -- a real shortage


def recovery(bench: Bench) -> None:
    """A small run, then the same with four fifths of what it reserved: it must end with the same adapter."""
    from recipe import events, make, run
    from safetensors.torch import load_file

    from lora_trainer.run import run as run_module

    options = {
        "treino": {"passos_acumulacao_gradiente": 1, "epocas": 4, "taxa_aprendizado": 1e-3, "precisao_mista": "nao"},
        "dados": {"tamanho_lote": 4, "resolucao": 512},
        "sistema": {"dispositivo": "cuda"},
        "memoria": {"preset": "nenhum"},
    }
    found: list[tuple[int, dict[str, torch.Tensor], int]] = []
    usual, limit = run_module.cap_process, 0
    for capped in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if capped:
            run_module.cap_process = lambda device, _, own=limit: cap_process(device, own)
        try:
            with tempfile.TemporaryDirectory() as folder:
                code = run(make(Path(folder), **options))
                out = Path(folder) / "saida" / "lora"
                found.append((code, load_file(out / "lora.safetensors"), len(events(out, "oom"))))
        finally:
            run_module.cap_process = usual
            torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
        limit = int(torch.cuda.max_memory_reserved() * 0.8)
    (_, plain, none), (code, tight, shortages) = found
    difference = max((plain[key] - tight[key]).abs().max().item() for key in plain)
    print(f"recovery: exit {code}, {none} and {shortages} shortages, adapters differ by {difference:.1e} (limit 1e-4)")
    assert code == 0, "the run did not end well"
    assert shortages > none, "the cap was not tight enough to mean anything"
    assert difference < 1e-4, "the adapter is another one"


# -- the allowance


def constants(bench: Bench) -> None:
    done = [one for one in bench.results if one.allocated and one.reserved and one.context is not None]
    if not done or bench.card is None:
        return
    context = max(one.context or 0 for one in done)
    workspaces = max((one.allocated or 0) - one.predicted for one in done)
    slack = max((one.reserved or 0) / (one.allocated or 1) - 1 for one in done)
    print(f"\n{bench.card.name}, torch {torch.__version__}; for machine/allowance.py:")
    print(f"    ({bench.card.capability[0]}, Allowance(context={-(-context // MIB)} * MIB, "
          f"workspaces={-(-max(workspaces, 0) // MIB)} * MIB, slack={slack:.3f})),")  # fmt: skip
    short = [one.name for one in done if (one.reserved or 0) > one.predicted_reserved]
    print(f"    reserve beyond what was allowed: {', '.join(short) or 'nowhere'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--plan-only", action="store_true", help="no step on the card")
    parser.add_argument(
        "--only", metavar="FAMILY:GIB", action="append", help="this job alone, e.g. sdxl:8; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write the results there too")
    given = parser.parse_args(arguments)
    card = read_card(0) if torch.cuda.is_available() else None
    device = torch.device("cuda", 0) if card else torch.device("cpu")
    precision = choose_precision("auto", torch.device("cuda"), card or Card("", (8, 0)))
    bench = Bench(device, time.monotonic() + 60 * given.minutes, card, base_allowance(card), precision)
    really = card is not None and not given.plan_only
    print(f"{card.name if card else 'no CUDA card: plans only'}, {precision.name}", flush=True)
    jobs = [(name, int(gib)) for name, _, gib in (word.partition(":") for word in given.only or ())] or JOBS
    for family, gib in jobs[:3]:
        bench.within(f"{family} {gib} GiB", SECONDS[family], lambda f=family, g=gib: job(bench, f, g, run=really))
    if really and not given.only:
        bench.within("recovery", 45, lambda: recovery(bench))
        bench.within("overlap", 110, lambda: overlap(bench))
    for family, gib in jobs[3:]:
        bench.within(f"{family} {gib} GiB", SECONDS[family], lambda f=family, g=gib: job(bench, f, g, run=really))
    constants(bench)
    if bench.left_out:
        print(f"no time left for: {', '.join(bench.left_out)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in bench.results], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
