"""Figures of speed, as times and ratios: python tests/bench/bench_speed.py [--quick]

Start-up (a wrong config, --help), the loop's overhead over a bare forward + backward + step on the same model, and the
second start with a full cache. The scan of 10,000 images is bench_scan.py.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]


def seconds(command: list[str], times: int) -> float:
    """Median wall time of a process."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def startup(times: int) -> None:
    entry = str(ROOT / "treinar.py")
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong.yaml"
        wrong.write_text("modelo:\n  modelo_bas: x\ntreino:\n  epocas: -1\n", encoding="utf-8")
        print(f"config error       {seconds([sys.executable, entry, '--config', str(wrong)], times):.2f} s (limit 0.5)")
    print(f"--help             {seconds([sys.executable, entry, '--help'], times):.2f} s (limit 0.3)")


def loop_overhead(steps: int) -> None:
    """Our step against the same model's bare step, alternating, so that a busy machine slows both alike."""
    import torch
    from recipe import make

    from lora_trainer import adapters, loop
    from lora_trainer.config.loading import load
    from lora_trainer.families import resolve
    from lora_trainer.optim import optimizers, schedules
    from lora_trainer.techniques import MemoryPlan

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = load(make(Path(folder), treino={"passos_acumulacao_gradiente": 1})).config
        family = resolve(config.model, config.data)
        family.configure(config.training, config.data)
        model = family.load_model(torch.device("cpu"), torch.float32)
    adapter = adapters.inject(model, family, config.model, seed=0)
    params = adapter.named_parameters()
    plan = MemoryPlan(())
    optimizer = plan.build_optimizer(optimizers.param_groups(params, config.training), config.training)
    batch = {**family.example_batch(2, (512, 512)), "seeds": torch.tensor([1, 2])}
    trainee = loop.Trainee(family, model, list(params.values()), optimizer, plan.scaler(), plan, torch.device("cpu"), 0, 1.0)
    ours = loop.train(trainee, ((i, [batch]) for i in range(10**9)), lambda s: schedules.lr_factor(s, 10**9, config.training))

    def bare() -> None:
        loss = family.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    next(ours)
    bare()
    timed: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(steps):
        for name, step in (("bare", bare), ("ours", lambda: next(ours))):
            start = time.perf_counter()
            step()
            timed[name].append(time.perf_counter() - start)
    ratio = min(timed["ours"]) / min(timed["bare"])
    print(f"loop overhead      {ratio:.3f} (limit 1.03; {min(timed['bare']) * 1000:.0f} ms bare, least of {steps})")


def second_start() -> None:
    """Opens of image files and loads of encoders when the cache is full: both must be 0."""
    import PIL.Image
    from recipe import make, run

    from lora_trainer.families.sd15.family import SD15

    counts = {"images": 0, "encoders": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with tempfile.TemporaryDirectory() as folder:
        config = make(Path(folder))
        run(config)
        PIL.Image.open = counted("images", PIL.Image.open)
        SD15.load_vae = counted("encoders", SD15.load_vae)
        SD15.load_text_encoders = counted("encoders", SD15.load_text_encoders)
        run(config)
    print(f"second start       {counts['images']} images read, {counts['encoders']} encoders loaded (limit 0, 0)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    startup(3 if quick else 9)
    loop_overhead(10 if quick else 40)
    second_start()


if __name__ == "__main__":
    main()
