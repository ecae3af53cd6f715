"""The files a language run leaves: a PEFT folder, a GGUF adapter with an Ollama Modelfile, a merged model; each checked.

The PEFT folder is proved by peft's own loader on the very model; the GGUF adapter is read back; a merged model is re-read,
and, where the base was quantised while training, compared in its answers, since it is not what the adapter was trained on.
"""

import functools
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..adapters import Adapter
from ..engine.tracker import host_memory
from ..errors import t
from ..export._folders import write_text
from ..export.gguf_lora import modelfile, read_gguf_lora, write_gguf_lora
from ..export.merge import measure_drift, merge
from ..export.peft_folder import save_peft_folder, verify_peft_folder
from ..export.proof import relative_norm
from ..families.causal_lm.family import CausalLM
from ..loop import to_device
from ..modality import Outputs, RunFacts
from ..techniques import MemoryPlan
from ..techniques.block_streaming import BlockStreaming
from .batches import TextBatchPlan, TextLoader
from .report import facts as data_facts

OLLAMA_CONTEXT = 2048
"""Tokens that Ollama gives a model unasked, or more; a run on shorter rows is no reason to give it less."""
DRIFT_BATCHES = 4
"""Enough rows to tell rounding from damage, few enough for a CPU."""


class TextOutputs(Outputs[CausalLM, TextBatchPlan]):
    def __init__(self, run: RunFacts, family: CausalLM, batches: TextBatchPlan, tokenizer: Any) -> None:
        super().__init__(run, family, batches)
        self.tokenizer = tokenizer

    def adapter_formats(self, intermediate: bool) -> tuple[str, ...]:
        """An intermediate result is never a whole model: where only that was asked for, it is a PEFT folder."""
        return tuple(name for name in self.formats if name != "merged") or ("peft",) * intermediate

    def finish(self, model: nn.ModuleDict, adapter: Adapter, step: int) -> list[str]:
        lines = super().finish(model, adapter, step)
        return [*lines, self._merged(model, adapter)] if "merged" in self.formats else lines

    def _write(self, adapter: Adapter, format_: str, path: Path, step: int) -> None:
        precision = self.config.output.precision
        if format_ == "peft":
            save_peft_folder(self._skeleton, adapter, self.family, path, precision, self._facts())
            self._save_tokenizer(path)
            return
        base = self.family.source.title()
        smallest: Literal["fp16", "fp32"] = "fp32" if precision == "fp32" else "fp16"
        write_gguf_lora(adapter.export(), self.family.config, path, precision=smallest, base=base)
        if path == self.folder.adapter("gguf"):
            longest = self.config.data.max_length if self.config.data.max_length > OLLAMA_CONTEXT else 0
            own_gguf = self.family.source.path if self.family.source.path.suffix == ".gguf" else Path("BASE.gguf")
            write_text(path.parent / "Modelfile", modelfile(str(own_gguf), f"./{path.name}", context=longest))

    def _save_tokenizer(self, path: Path) -> None:
        self.batches.dataset.template.install(self.tokenizer)
        self.tokenizer.save_pretrained(path)

    @functools.cached_property
    def _skeleton(self) -> nn.ModuleDict:
        """A PEFT folder names the layers it targets, which takes the others' names."""
        return self.family.load_model(torch.device("meta"), torch.bfloat16)

    def _facts(self) -> dict[str, str]:
        output = self.config.output
        own = {"title": output.title, "author": output.author, "license": output.license, "about": output.description}
        numbers = {name: str(value) for name, value in data_facts(self.batches).items()}
        return {name: value for name, value in own.items() if value} | numbers

    def _proved(self, model: nn.ModuleDict, adapter: Adapter, path: Path, step: int) -> str:
        if path.suffix == ".gguf":
            return self._read_back(adapter, path, f"{step}/{self.run.total}")
        return verify_peft_folder(model, adapter, path, self.family.probe).line(f"{step}/{self.run.total}")

    def _read_back(self, adapter: Adapter, path: Path, steps: str) -> str:
        with host_memory():
            live = adapter.export()
            stored = read_gguf_lora(path, self.family.config, list(live))
            worst = max(relative_norm(stored[name].delta(), live[name].delta()) for name in live)
        assert worst < 2e-3, f"{path}: delta W differs by {worst:.1e} after reading back"
        return t(
            pt=f"pronto: {path}: {steps} passos, {len(live)} módulos, relido: difere {worst:.1e}; para o Ollama: "
            f"ollama create {self.folder.name} -f Modelfile",
            en=f"done: {path}: {steps} steps, {len(live)} modules, read back: differs {worst:.1e}; for Ollama: "
            f"ollama create {self.folder.name} -f Modelfile",
        )

    def _merged(self, model: nn.ModuleDict, adapter: Adapter) -> str:
        path = self.folder.adapter("merged")
        with host_memory():
            merged = merge(self.family, adapter.export(), path)
        self._save_tokenizer(path)
        self.written.append(path)
        quantised = self._quantisation()
        self.run.tell(*merged.notices(quantised))
        if quantised is None:
            return t(pt=f"pronto: {path}: modelo unido", en=f"done: {path}: merged model")
        drift = self._drift(model, path)
        return t(
            pt=f"pronto: {path}: modelo unido; em relação ao treino (base em {quantised}): {drift}",
            en=f"done: {path}: merged model; against the training (base in {quantised}): {drift}",
        )

    def _quantisation(self) -> str | None:
        if self.family.source.gguf is not None:
            return "gguf"
        chosen = self.config.memory.base_quantization
        return None if chosen in ("no", "auto") else chosen

    def _drift(self, model: nn.ModuleDict, path: Path) -> str:
        loader, dataset = TextLoader(self.batches.dataset, 0), self.batches.dataset
        device = self.family.probe(model).device
        if dataset.validation:
            batches = [batch for batch, _ in zip(loader.validation_batches(), range(DRIFT_BATCHES), strict=False)]
        else:
            parts = [part for draws in self.batches.window(0) for part in self.batches.split(draws, 1)]
            batches = [loader.load_batch(part) for part in parts[:DRIFT_BATCHES]]
        plan = MemoryPlan((BlockStreaming(1.0),))
        with torch.no_grad():
            drift = measure_drift(self.family, model, path, [to_device(batch, device) for batch in batches], plan)
        return drift.line()
