"""Our step against transformers' Trainer + peft, TRL's SFTTrainer and Unsloth: seconds and memory, on the CPU.

    python tests/bench/bench_language.py [--python trl=VENV/bin/python] [--python unsloth=VENV/bin/python]

The same model (SmolLM2-135M, bf16, from the demo's GGUF), rows, batch, LoRA (rank 8, all linear layers), optimizer and
threads. Every contestant is a process (language_worker.py); they step in turns, so that a busy machine slows all alike.
Peers that cannot be imported are left out. TRL and Unsloth want environments of their own: `pip install trl peft datasets`;
`pip install torch==2.13.0 unsloth`, then `pip uninstall torchvision`. Prints ratios to ours; exit 1 where we are behind.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("language_worker.py")
sys.path[:0] = [str(ROOT)]

NAMES = ("ours", "trainer", "trl", "unsloth")
MARK = "@@"
WARM_UP = 2
"""Steps that are not counted: allocations, the optimizer's state."""
SAME_LOSS = 0.02
"""Relative difference of the first loss, above which contestants do not do the same work."""


@dataclass
class Contestant:
    name: str
    process: "subprocess.Popen[str]"
    log: Path
    ready_rss: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def read(self) -> dict[str, Any] | None:
        """What it says next; None when it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[len(MARK) :]))
        return None

    def go(self) -> bool:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        while (said := self.read()) is not None:
            if "loss" in said:
                self.losses.append(said["loss"])
            else:
                self.steps.append(said)
                return True
        return False

    def last_words(self) -> str:
        return " ".join(self.log.read_text(encoding="utf-8").strip().splitlines()[-2:])[:300]

    def drain(self) -> None:
        while (said := self.read()) is not None:
            if "loss" in said:
                self.losses.append(said["loss"])


def write_base(gguf: Path, folder: Path) -> None:
    """The demo's model as any library loads it: bf16 safetensors, config and tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    from lora_trainer.families.causal_lm.base import GgufBase
    from lora_trainer.files.gguf_tokenizer import tokenizer
    from lora_trainer.files.sources import Source

    base = GgufBase(Source(gguf, "file", "modelo_base"), unpacked=True)
    module = base.build(torch.bfloat16)
    base.fill(module, torch.device("cpu"), torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_config(base.config, dtype=torch.bfloat16)
    plain.load_state_dict(module.state_dict(), strict=False)
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer(base.weights.file).save_pretrained(folder)


def rows_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """The demo's conversations end to end, cut into rows; repeated as often as needed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = ROOT / "lora_trainer" / "demo" / "linguagem" / "conversas.jsonl"
    messages = [json.loads(line)["messages"] for line in data.read_text(encoding="utf-8").splitlines()]
    text = "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in messages)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids = ids * (count * length // len(ids) + 1)
    return [ids[at * length : (at + 1) * length] for at in range(count)]


def start(name: str, python: str, job: Path, work: Path) -> Contestant | None:
    threads = str(json.loads(job.read_text(encoding="utf-8"))["threads"])
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": threads}
    with (work / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [python, str(WORKER), name, str(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            text=True, env={**os.environ, **quiet}, cwd=work,
        )  # fmt: skip
    contestant = Contestant(name, process, work / f"{name}.log")
    said = contestant.read()
    if said is None:
        print(f"{name}: left out ({contestant.last_words()})", flush=True)
        return None
    contestant.ready_rss = said["rss"]
    return contestant


def race(contestants: list[Contestant], steps: int) -> list[Contestant]:
    """All steps, in turns; who fails drops out."""
    for number in range(steps + 1):
        for contestant in list(contestants):
            if not contestant.go():
                print(f"{contestant.name}: failed at step {number + 1} ({contestant.last_words()})", flush=True)
                contestants.remove(contestant)
    for contestant in contestants:
        assert contestant.process.stdin is not None
        contestant.process.stdin.close()
        contestant.drain()
        contestant.process.wait()
    return contestants


def figures(contestant: Contestant) -> dict[str, float]:
    timed = contestant.steps[WARM_UP:-1]
    return {
        "wall s": statistics.median(step["wall"] for step in timed),
        "least": min(step["wall"] for step in timed),
        "cpu s": min(step["cpu"] for step in timed),
        "peak RSS MiB": contestant.steps[-2]["rss"],
        "RSS over load": contestant.steps[-2]["rss"] - contestant.ready_rss,
        "tensors MiB": contestant.steps[-1]["tensors"],
        "first loss": contestant.losses[0],
        "last loss": contestant.losses[-1],
    }


COMPARED = ("wall s", "least", "cpu s", "peak RSS MiB", "tensors MiB")


def report(contestants: list[Contestant]) -> int:
    table = {contestant.name: figures(contestant) for contestant in contestants}
    print(f"{'':10}" + "".join(f"{name:>15}" for name in table["ours"]))
    for name, row in table.items():
        print(f"{name:10}" + "".join(f"{value:15.3f}" for value in row.values()))
    behind = []
    for name, row in table.items():
        if name == "ours":
            continue
        ratios = {kind: row[kind] / table["ours"][kind] for kind in COMPARED}
        print(f"{name} / ours: " + "  ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios.items()))
        behind += [f"{name}: {kind}" for kind in ("cpu s", "peak RSS MiB", "tensors MiB") if ratios[kind] < 1]
        if abs(row["first loss"] / table["ours"]["first loss"] - 1) > SAME_LOSS:
            print(f"{name}: another first loss; it is not doing the same work")
    print("ahead of all" if not behind else f"behind: {', '.join(behind)}")
    return 1 if behind else 0


def main() -> int:
    from lora_trainer.demo.fetch_smollm2 import FILE, FOLDER

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=FOLDER / FILE, help="python -m lora_trainer.demo.fetch_smollm2")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="more only on an idle machine")
    parser.add_argument("--no-autocast", action="store_true", help="peers without bf16 autocast")
    options = parser.parse_args()
    pythons = dict(pair.split("=", 1) for pair in options.python)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_base(options.gguf, work / "base")
        rows = rows_of(work / "base", options.batch * (options.steps + 2), options.length)
        job = {
            "base": str(work / "base"), "rows": rows, "batch": options.batch, "steps": options.steps, "rank": 8,
            "threads": options.threads, "work": str(work), "autocast": not options.no_autocast,
        }  # fmt: skip
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        started = [start(name, pythons.get(name, sys.executable), work / "job.json", work) for name in options.only]
        return report(race([one for one in started if one is not None], options.steps))


if __name__ == "__main__":
    sys.exit(main())
