"""How far down a run finds its way when memory is short: python tests/bench/bench_caps.py [--config F] [key=value …]

The run as it is, everything resident, gives the peak of live tensor bytes; then it is run again under a tracker that
raises torch.OutOfMemoryError above a share of that peak, from generous to a quarter, without any plan. Prints the rungs
taken, and how far the losses are from those of the first run. Without --config: the demo, shortened.
"""

# ruff: noqa: E402
import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]

from recipe import events, run

from lora_trainer.engine.tracker import MemoryTracker

SHARES = (1.1, 0.9, 0.7, 0.5, 0.4, 0.33, 0.25)
DEMO = (
    "treino.passos_maximos=4", "amostras.cada=2", "amostras.passos=2", "amostras.medida=null", "dados.fracao_validacao=0.1",
    "treino.validar_cada=2", "saida.salvar_cada=2", "saida.precisao=fp32",
)  # fmt: skip
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--keep-cache", action="store_true", help="encode captions and images in the first run only")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    config = options.config or ROOT / "configs" / "demo_imagem.yaml"
    settings = [*(() if options.config else DEMO), *options.settings]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name) / "cache"

        def train(title: str, checkpointing: str, limit: int | None) -> tuple[int, Path, MemoryTracker, float]:
            began = time.monotonic()
            words = (f"saida.diretorio={folder}", f"saida.nome={title}", f"dados.diretorio_cache={cache}", *settings)
            with MemoryTracker(limit=limit, record=False) as tracker:
                code = run(config, *words, f"treino.checkpoint_gradiente={checkpointing}")
            if not options.keep_cache:
                shutil.rmtree(cache, ignore_errors=True)
            return code, folder / title, tracker, time.monotonic() - began

        code, free, tracker, seconds = train("livre", "nao", None)
        assert code == 0, f"exit {code}"
        peak, losses = tracker.peak, {row["step"]: row["loss"] for row in events(free)}
        for share in options.shares:
            code, met, tracker, taken = train(f"teto-{share:g}", "auto", int(share * peak))
            found = {row["step"]: row["loss"] for row in events(met)}
            apart = max((abs(found[step] - loss) for step, loss in losses.items()), default=0.0) if not code else -1.0
            rows.append((share, share * peak / MIB, code, tracker.peak / MIB, apart, taken, rungs(met)))
    print(f"\nresident: {peak / MIB:.1f} MiB, {len(losses)} steps, {seconds:.0f} s")
    print(f"{'cap':>5} {'MiB':>8} {'exit':>4} {'peak':>8} {'losses':>8} {'s':>5}  rungs")
    for share, limit, code, held, apart, taken, names in rows:
        print(f"{share:5g} {limit:8.1f} {code:4d} {held:8.1f} {apart:8.1e} {taken:5.0f}  {names}")
    sys.exit(int(any(row[2] for row in rows)))


def rungs(folder: Path) -> str:
    """What was changed at each shortage, in order."""
    told, before = Counter[str](), {}
    for row in events(folder, "oom"):
        now = {"micro-batch": row["micro_batch"], **row["plan"]} if "plan" in row else {row["phase"]: row["rung"]}
        changed = [f"{key.rpartition('.')[2]} {value}" for key, value in now.items() if before.get(key) != value]
        told[f"{row['phase']}: {', '.join(changed) if before or 'plan' not in row else 'first rung'}"] += 1
        before = {**before, **now}
    return "; ".join(text + (f" (x{count})" if count > 1 else "") for text, count in told.items()) or "-"


if __name__ == "__main__":
    main()
