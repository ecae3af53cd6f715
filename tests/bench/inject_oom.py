"""Two hundred out-of-memory errors in one run of the demo: python tests/bench/inject_oom.py [--walk] [--count 200]

A first run goes by the last rung from its start: it counts the operators of every phase, and gives the expected adapter.
The second meets real torch.OutOfMemoryErrors at random operators of each phase, spread over the run (those that make
tensors on the device; a seed fixes them). It must end, with the same losses at every step, the same adapter within 1e-4,
as many "oom" events as errors, and no memory left behind. The demo is shortened, and validates, previews and saves often.

The second run goes by the last rung from its start too. With --walk it starts at the first rung and finds its way down:
its first steps then add the same numbers in another order, which hundreds of steps of Adam magnify. So a third run,
by the first rung and without any shortage, tells how far that alone takes an adapter; losses must still agree.
"""

# ruff: noqa: E402
import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]

import psutil
from helpers.out_of_memory import RunsOutIn
from recipe import events, run
from safetensors.torch import load_file

from lora_trainer.planner import ladder
from lora_trainer.run.planning import Planning
from lora_trainer.run.training import Training

SHARES = {
    "forward": 0.28, "backward": 0.28, "optimizer": 0.12, "load": 0.1, "validation": 0.08, "preview": 0.06, "save": 0.06,
}  # fmt: skip
CACHING = {"text_cache": 2, "latent_cache": 2}
"""The ladders of the caching phase are that long; the last rung is the CPU, where no card runs out."""
REBUILT = 14
"""About how often the second run loads the base; the first one does once."""
OPTIONS = (
    "treino.checkpoint_gradiente=auto", "treino.validar_cada=6", "dados.fracao_validacao=0.1", "saida.salvar_cada=3",
    "saida.precisao=fp32", "amostras.cada=6", "amostras.passos=2", "amostras.medida=null",
)  # fmt: skip


def places(counts: Mapping[str, int], total: int, rng: random.Random) -> dict[str, set[int]]:
    """Operators of every phase, by their number within it: a random one in each of as many equal stretches."""
    wanted = {phase: round(share * (total - sum(CACHING.values()))) for phase, share in SHARES.items()}
    wanted["forward"] += total - sum(wanted.values()) - sum(CACHING.values())
    ranges = {**counts, "load": counts["load"] * REBUILT}
    found = {}
    for phase, count in {**CACHING, **wanted}.items():
        stretch = ranges[phase] / count
        found[phase] = {1 + int((place + rng.random()) * stretch) for place in range(count)}
    return found


def from_the_last_rung() -> Any:
    """A run whose plan is the last one from its start."""
    settle = Planning.settle

    def settled(self: Planning, *args: Any, **kwargs: Any) -> Any:
        loaded = settle(self, *args, **kwargs)
        while (lower := ladder.next_rung(self.rung, loaded.settled)) is not None:
            self.rung = lower
        return loaded

    return mock.patch.object(Planning, "settle", settled)


class Watched:
    """Resident memory after every recovery."""

    def __init__(self) -> None:
        self.resident: list[int] = []
        recovered = Training._recover

        def recover_and_look(*args: Any) -> int:
            step = recovered(*args)
            gc.collect()
            self.resident.append(psutil.Process().memory_info().rss)
            return step

        self.patch = mock.patch.object(Training, "_recover", recover_and_look)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--walk", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(options.seed)

        def train(run_name: str) -> tuple[Path, float]:
            began = time.monotonic()
            words = (*OPTIONS, f"saida.diretorio={folder}", f"saida.nome={run_name}", f"treino.epocas={options.epochs}")
            code = run(ROOT / "configs" / "demo_imagem.yaml", *words, f"dados.diretorio_cache={folder / run_name}-cache")
            assert code == 0, f"{run_name}: exit {code}"
            return folder / run_name, time.monotonic() - began

        with from_the_last_rung(), RunsOutIn().watching() as counter:
            expected, expected_seconds = train("esperado")
        injector, watched = RunsOutIn(places(counter.counts, options.count, rng)), Watched()
        with injector.watching(), watched.patch, nullcontext() if options.walk else from_the_last_rung():
            met, seconds = train("interrompido")
        rounding = difference(expected, train("primeiro")[0]) if options.walk else None
        print(f"\nseconds: {expected_seconds:.0f} on the last rung, {seconds:.0f} with shortages")
        sys.exit(0 if report(expected, met, injector, watched.resident, rounding) else 1)


def difference(left: Path, right: Path) -> float:
    """Of two runs' adapters, at most."""
    one, other = (load_file(folder / f"{folder.name}.safetensors") for folder in (left, right))
    return max((one[key] - other[key]).abs().max().item() for key in one)


def report(expected: Path, met: Path, injector: RunsOutIn, resident: list[int], rounding: float | None) -> bool:
    raised, told = injector.failed.total(), events(met, "oom")
    plan = json.loads((met / "plano.json").read_text(encoding="utf-8"))
    adapters = difference(expected, met)
    steps = [{row["step"]: row["loss"] for row in events(folder)} for folder in (expected, met)]
    apart = max(abs(steps[0][step] - loss) for step, loss in steps[1].items())
    print(f"raised: {raised} ({', '.join(f'{phase} {n}' for phase, n in sorted(injector.failed.items()))})")
    print(f"told: {len(told)} ({', '.join(f'{phase} {n}' for phase, n in Counter(row['phase'] for row in told).items())})")
    print(f"steps: {len(steps[0])} and {len(steps[1])}; {len(events(met))} made in all; losses differ by {apart:.1e} at most")
    print(f"adapter differs by {adapters:.1e} at most; last plan: micro-batch {plan['micro_batch']}, {plan['plan']}")
    print(f"resident after recovery, MiB: {', '.join(str(n >> 20) for n in resident[:: max(1, len(resident) // 10)])}")
    if rounding is not None:
        print(f"adapter of the first rung, without shortages: differs by {rounding:.1e} at most")
    good = raised == len(told) and steps[0].keys() == steps[1].keys() and apart < 1e-4
    good = good and adapters < (1e-4 if rounding is None else 2 * rounding)
    print("OK" if good else "FAILED")
    return good


if __name__ == "__main__":
    main()
