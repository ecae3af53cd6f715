"""kill -9 at random moments, resume each time, compare the final file: python tests/bench/kill_resume.py [--kills 20]

One straight run gives the expected bytes; another is killed again and again, at a random time after its start (so in
any phase: start-up, caching, loop, saving), until it has been killed often enough; then it is let finish.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "recipes")]


def main() -> None:
    from recipe import events, make, run, start

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make(folder, treino={"epocas": 60}, saida={"salvar_cada": 7, "nome": "lora"},
                      modelo={"dropout_lora": 0.1}, amostras={"prompts": ["a cat"], "cada": 40, "passos": 2})
        began = time.monotonic()
        straight = start(config)
        assert straight.wait() == 0, straight.stdout.read() if straight.stdout else ""
        whole = time.monotonic() - began
        run_folder = folder / "saida" / "lora"
        expected = (run_folder / "lora.safetensors").read_bytes()
        run_folder.rename(folder / "saida" / "reto")
        killed = 0
        while killed < options.kills:
            process = start(config, *(["--retomar"] if run_folder.exists() else []))
            time.sleep(rng.uniform(0.1, 0.9 * whole))
            if process.poll() is not None:
                assert process.returncode == 0, process.stdout.read() if process.stdout else ""
                print("finished before it could be killed; starting over")
                assert (run_folder / "lora.safetensors").read_bytes() == expected
                run_folder.rename(folder / "saida" / f"fim-{time.monotonic_ns()}")
                continue
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
            reached = max((row["step"] for row in events(run_folder)), default=0) if (run_folder / "metricas.jsonl").exists() else 0
            print(f"killed {killed}: step {reached}")
        assert run(config, "--retomar") == 0
        equal = (run_folder / "lora.safetensors").read_bytes() == expected
        print(f"{killed} kills; final file {'bit-equal' if equal else 'DIFFERENT'}")
        sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
