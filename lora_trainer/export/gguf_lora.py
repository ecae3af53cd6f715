"""A language LoRA as llama.cpp and Ollama load it: a GGUF file of the type "adapter", and a Modelfile that names it.

Names and changes are those of llama.cpp's convert_lora_to_gguf: `blk.N.attn_q.weight.lora_a` is A (r, in), `….lora_b` is
B (out, r), and where the converter orders the rows of a weight anew (files/gguf_names.py), those of B follow. One alpha holds
for the whole file: a module whose scale is not alpha / rank has the difference in its B. The base may be any GGUF of the
model, whatever its quantisation. Left out, because llama.cpp cannot load them: DoRA, adapters on one expert of a mixture,
and on a head that the model shares with its embeddings.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..bases.weights import Piece
from ..errors import DivergedError, SourceError, UserError, t
from ..files.gguf_blocks import dequantize
from ..files.gguf_names import ARCHITECTURES, paired_heads, tensor_name
from ..files.gguf_reader import GgufFile, open_gguf
from ..layouts.lora import Lora, LoraModule
from ..layouts.peft import LANGUAGE_PART as PART
from ._folders import new_file
from .write import DTYPES

SAME_AS = {"mistral": "llama", "gemma3": "gemma3", "gemma3_text": "gemma3"}
"""transformers' types that llama.cpp's converter writes as another architecture."""
WAY_OUT = (
    "saida.formatos: peft grava todos os módulos; o modelo mesclado também",
    "output.formats: peft writes all modules; so does the merged model",
)


@dataclass(frozen=True)
class _Target:
    """A module's weight in llama.cpp: its name, and the order of its rows."""

    tensor: str
    order: Tensor | None


def write_gguf_lora(
    lora: Lora, config: Any, path: Path, *, precision: Literal["fp16", "fp32"] = "fp16", base: str = ""
) -> Path:
    """Write `path`. `config`: of the base, as transformers has it; `base`: its name, for people.

    UserError, and nothing written, for what llama.cpp cannot load; all such modules are named together.
    """
    arch = architecture_for(config)
    doras = [name for name, module in lora.items() if module.magnitude is not None]
    targets = _checked_targets(lora, doras, config, arch)
    alpha = next(iter(lora.values())).alpha
    tensors: dict[str, Tensor] = {}
    for name, module in lora.items():
        fitted, target = module.with_scale(alpha / module.rank), targets[name]
        tensors[f"{target.tensor}.lora_a"] = fitted.down.flatten(1)
        tensors[f"{target.tensor}.lora_b"] = _in_file_order(fitted.up.flatten(1), target.order)
    stored = {name: tensor.to(DTYPES[precision]).contiguous() for name, tensor in tensors.items()}
    _refuse_non_finite(stored, path)
    _write(path, stored, {"arch": arch, "alpha": alpha, "name": path.stem, "base": base})
    return path


def check_gguf_lora(names: Collection[str], config: Any, *, dora: bool) -> None:
    """Before training: UserError for modules that write_gguf_lora would refuse after it."""
    _checked_targets(names, names if dora else (), config, architecture_for(config))


def read_gguf_lora(path: Path, config: Any, names: Collection[str]) -> Lora:
    """The modules `names` of an adapter file, as write_gguf_lora took them. SourceError where one is missing."""
    file = open_gguf(path, str(path))
    targets = {name: _target(name, config, architecture_for(config)) for name in names}
    lora: Lora = {}
    for name, target in targets.items():
        if target is None or f"{target.tensor}.lora_a" not in file.tensors:
            raise SourceError.said(
                pt=f"{path.name} não tem o módulo {name}", en=f"{path.name} lacks the module {name}", where=str(path)
            )
        down, stored = (_values(file, f"{target.tensor}.lora_{letter}") for letter in "ab")
        up = stored if target.order is None else stored[target.order]
        lora[name] = LoraModule(down, up, float(file.metadata["adapter.lora.alpha"]) / len(down))
    return lora


def architecture_for(config: Any) -> str:
    """llama.cpp's name for a model of this config; UserError where none is known."""
    by_type = {known.model_type: name for name, known in ARCHITECTURES.items()} | SAME_AS
    if config.model_type not in by_type:
        raise UserError.said(
            pt=f"não sei gravar um LoRA em GGUF para modelos {config.model_type}",
            en=f"GGUF LoRAs for {config.model_type} models cannot be written",
            hint_pt=f"use {WAY_OUT[0]}",
            hint_en=f"use {WAY_OUT[1]}",
        )
    return by_type[config.model_type]


def modelfile(base: str, adapter: str, *, context: int = 0) -> str:
    """What `ollama create NAME -f Modelfile` reads; paths relative to it. The chat template comes with the base."""
    lines = [f"FROM {_ollama_path(base)}", f"ADAPTER {_ollama_path(adapter)}"]
    if context:
        lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def _ollama_path(name: str) -> str:
    """A file needs a directory before it, or Ollama takes it for the name of a model in its library."""
    is_file = name.lower().endswith(".gguf") and not Path(name).is_absolute() and not name.startswith(".")
    return f"./{name}" if is_file else name


def _checked_targets(names: Collection[str], dora: Collection[str], config: Any, arch: str) -> dict[str, _Target]:
    """The targets of the modules `names`, of which `dora` are DoRA; UserError where llama.cpp has none."""
    found = {name: _target(name, config, arch) for name in names}
    wrong = [name.removeprefix(f"{PART}.") for name, target in found.items() if target is None]
    if doras := [name.removeprefix(f"{PART}.") for name in dora]:
        problem = t(pt="o llama.cpp não carrega DoRA", en="llama.cpp does not load DoRA")
        raise UserError(f"{problem}: {_few(doras)}", t(pt=WAY_OUT[0], en=WAY_OUT[1]))
    if wrong:
        problem = t(pt="o llama.cpp não carrega um LoRA destes módulos", en="llama.cpp does not load a LoRA of these modules")
        raise UserError(f"{problem}: {_few(wrong)}", t(pt=WAY_OUT[0], en=WAY_OUT[1]))
    return {name: target for name, target in found.items() if target is not None}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (t(pt=f" e mais {len(names) - 4}", en=f" and {len(names) - 4} more") * (len(names) > 4))


def _target(name: str, config: Any, arch: str) -> _Target | None:
    tensor = tensor_name(f"{name.removeprefix(f'{PART}.')}.weight", arch)
    tied = tensor == "output.weight" and config.tie_word_embeddings
    if tensor is None or tied or tensor == "token_embd.weight" or "_exps." in tensor:
        return None
    heads = (config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    if not (pairs := paired_heads(arch, tensor, heads)):
        return _Target(tensor, None)
    return _Target(tensor, Piece(tensor, pairs=pairs).ordered(torch.arange(head_dim * pairs)))


def _in_file_order(up: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return up
    stored = torch.empty_like(up)
    stored[order] = up
    return stored


def _values(file: GgufFile, name: str) -> Tensor:
    info = file.tensors[name]
    return dequantize(file.raw(name), info.dtype, torch.float32).view(info.shape)


def _refuse_non_finite(tensors: Mapping[str, Tensor], path: Path) -> None:
    wrong = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise DivergedError.said(
            pt=f"{len(wrong)} tensores do LoRA não são finitos em {tensors[wrong[0]].dtype} ({wrong[0]}, …); nada "
            "foi gravado",
            en=f"{len(wrong)} tensors of the LoRA are not finite in {tensors[wrong[0]].dtype} ({wrong[0]}, …); "
            "nothing was written",
            hint_pt="diminua taxa_aprendizado, ou use precisao: fp32",
            hint_en="lower learning_rate, or use precision: fp32",
            where=str(path),
        )


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """All or nothing."""
    from gguf import GGUFWriter

    with new_file(path, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
        writer = GGUFWriter(temporary, facts["arch"])
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", facts["alpha"])
        writer.add_name(facts["name"])
        if facts["base"]:
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, facts["base"])
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
