"""One contestant of bench_language.py, in a process of its own: steps when told to, says what the step took.

    python tests/bench/language_worker.py ours|trainer|trl|unsloth JOB.json

A line on standard input lets it make one optimizer step; it answers with a JSON line after `MARK`: seconds of wall and of CPU,
loss, resident memory. The last step of a job is made under our MemoryTracker instead, which counts live tensor bytes in any
library and slows them all down. Everyone gets the same rows in the same order, the same LoRA, bf16 and AdamW.
"""

import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]
NAME, JOB = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
if NAME == "unsloth":
    import unsloth  # noqa: F401  (patches what is imported after it)

import torch  # noqa: E402

from lora_trainer.engine.tracker import MemoryTracker  # noqa: E402

MARK = "@@"
OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever libraries print goes to standard error
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALPHA, LEARNING_RATE = 16, 1e-3
MIB = 2**20


def say(**facts: Any) -> None:
    OUT.write(MARK + json.dumps(facts) + "\n")


def resident() -> float:
    """MiB, now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


class Gate:
    """Between the steps: waits to be told, then measures until `done`. `tensors` gives all that is resident."""

    def __init__(self, tensors: Callable[[], Iterator[torch.Tensor]]) -> None:
        self.tensors, self.step, self.loss = tensors, 0, float("nan")
        self.stack = ExitStack()
        self.tracker: MemoryTracker | None = None
        say(ready=True, rss=resident())

    def begin(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.step += 1
        if self.step > JOB["steps"]:
            gc.collect()
            self.tracker = MemoryTracker(record=False)
            self.tracker.mark(self.tensors(), "frozen")
            self.stack.enter_context(self.tracker)
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def done(self) -> None:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.stack.close()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        facts: dict[str, Any] = {"wall": wall, "cpu": cpu, "rss": peak}
        if self.tracker is not None:
            facts["tensors"] = self.tracker.peak / MIB
        say(**facts)


def state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))


def rows() -> list[list[int]]:
    return JOB["rows"]


def ours() -> None:
    from lora_trainer import adapters, loop
    from lora_trainer.config.schema import ModelConfig, TrainingConfig
    from lora_trainer.families.causal_lm.family import CausalLM
    from lora_trainer.files.sources import open_source
    from lora_trainer.optim import optimizers
    from lora_trainer.techniques import MemoryPlan
    from lora_trainer.techniques.mixed_precision import MixedPrecision

    cpu = torch.device("cpu")
    training = TrainingConfig(learning_rate=LEARNING_RATE, weight_decay=0.0)
    settings = ModelConfig(base_model=JOB["base"], lora_rank=JOB["rank"], lora_alpha=ALPHA, lora_targets="all")
    family = CausalLM.open(open_source(JOB["base"]), settings)
    plan = MemoryPlan((MixedPrecision("bf16", "cpu"),))
    model = family.load_model(cpu, torch.bfloat16)
    named = adapters.inject(model, family, settings, 0, formats=("peft",)).named_parameters()
    plan.wrap(model, family.blocks(model))
    optimizer = plan.build_optimizer(optimizers.param_groups(named, training), training)
    gate = Gate(lambda: (t for group in (model.parameters(), model.buffers(), state_of(optimizer)) for t in group))
    trainee = loop.Trainee(family, model, list(named.values()), optimizer, plan.scaler(), plan, cpu, 0, 1.0)
    steps = loop.train(trainee, ((n, [batch]) for n, batch in enumerate(batches())), lambda step: 1.0)
    for _ in range(JOB["steps"] + 1):
        gate.begin()
        loss = next(steps).loss
        gate.done()
        say(loss=loss)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    size = JOB["batch"]
    for start in range(0, len(rows()), size):
        ids = torch.tensor(rows()[start : start + size])
        positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
        batch = {"input_ids": ids, "labels": ids.clone(), "segment_ids": torch.ones_like(ids), "position_ids": positions}
        yield {**batch, "seeds": torch.zeros(len(ids), dtype=torch.int64), "weight": torch.ones(len(ids))}


def peft_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=JOB["rank"], lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, bias="none", task_type="CAUSAL_LM"
    )


def arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": JOB["batch"], "max_steps": JOB["steps"] + 1,
        "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "bf16": JOB["autocast"], "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1, "seed": 0,
        "disable_tqdm": True, "gradient_checkpointing": False, "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False,
    }  # fmt: skip


def gated(trainer: Any) -> None:
    """Run a transformers Trainer through the gate."""
    from transformers import TrainerCallback

    gate = Gate(
        lambda: (
            t for group in (trainer.model.parameters(), trainer.model.buffers(), state_of(trainer.optimizer)) for t in group
        )
    )

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            gate.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            gate.done()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                say(loss=float(logs["loss"]))

    trainer.add_callback(Steps())
    trainer.train()


def trainer(folder: str) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(JOB["base"], dtype=torch.bfloat16), peft_config())
    data = [{"input_ids": row, "labels": row} for row in rows()]
    gated(Trainer(model=model, args=TrainingArguments(**arguments(folder)), train_dataset=data, data_collator=tensors))


def tensors(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}


def sft_arguments(folder: str) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        **arguments(folder), max_length=len(rows()[0]), packing=False, dataset_kwargs={"skip_prepare_dataset": True}
    )


def sft_data() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"input_ids": rows(), "labels": rows()})


def trl(folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(JOB["base"], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(JOB["base"])
    gated(
        SFTTrainer(
            model=model,
            args=sft_arguments(folder),
            train_dataset=sft_data(),
            processing_class=tokenizer,
            peft_config=peft_config(),
        )
    )


def with_unsloth(folder: str) -> None:
    from trl import SFTTrainer
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        JOB["base"], max_seq_length=len(rows()[0]), dtype=torch.bfloat16, load_in_4bit=False, local_files_only=True
    )
    model = FastLanguageModel.get_peft_model(
        model, r=JOB["rank"], lora_alpha=ALPHA, lora_dropout=0, bias="none", target_modules=TARGETS,
        use_gradient_checkpointing=False, random_state=0,
    )  # fmt: skip
    gated(
        SFTTrainer(model=model, args=sft_arguments(folder), train_dataset=sft_data(), processing_class=tokenizer)
    )


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    if NAME == "ours":
        ours()
    else:
        {"trainer": trainer, "trl": trl, "unsloth": with_unsloth}[NAME](str(Path(JOB["work"]) / NAME))


if __name__ == "__main__":
    main()
