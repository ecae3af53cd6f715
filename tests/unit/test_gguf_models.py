"""Configs, names and orders of rows, for each architecture: logits against transformers and against llama.cpp's own.

tests/golden/gguf_llama_cpp.json holds the last token's logits that libllama (llama.cpp v0.5.0, CPU, float32 cache, no flash
attention) computed from these files, alone and under the adapter that write_gguf_lora made of `tiny_lora`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import MODELS, architecture_of, merge, probe_ids, tiny_lora, tiny_model, write_model
from helpers.gguf_lm import GgufLM
from torch import nn

from lora_trainer.bases.gguf import parameter_pieces
from lora_trainer.errors import SourceError, UserError
from lora_trainer.export.gguf_lora import modelfile, read_gguf_lora, write_gguf_lora
from lora_trainer.families.causal_lm.family import PART
from lora_trainer.files.gguf_config import transformers_config
from lora_trainer.files.gguf_reader import GgufFile, open_gguf
from lora_trainer.layouts import LoraModule

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_llama_cpp.json").read_text())
each_model = pytest.mark.parametrize("name", sorted(MODELS))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def get(name: str) -> tuple[nn.Module, GgufFile]:
        if name not in made:
            model = tiny_model(name)
            made[name] = model, open_gguf(write_model(folder / f"{name}.gguf", model, name))
        return made[name]

    return get


def load(file: GgufFile) -> Any:
    family = GgufLM(file.path)
    model: Any = family.load_model(CPU, torch.float32)[PART]
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(probe_ids()).logits[0]


@each_model
def test_the_model_is_the_one_that_was_written(files, name):
    model, file = files(name)
    model.set_attn_implementation("eager")
    assert torch.equal(logits(load(file)), logits(model))


@each_model
def test_llama_cpp_computes_the_same(files, name):
    last = logits(load(files(name)[1]))[-1]
    tolerance = 3e-3 if name.startswith("gemma") else 2e-5  # ggml looks GELU up in 16 bits
    torch.testing.assert_close(last, torch.tensor(GOLDEN[name]["base"]), rtol=0, atol=tolerance)


@each_model
def test_llama_cpp_applies_the_adapter_as_we_do(files, name, tmp_path):
    """The file is what llama.cpp computed with: equal tensors; and its logits are those of the merged model."""
    plain = files(name)[0]
    lora = tiny_lora(plain)
    path = write_gguf_lora(lora, plain.config, tmp_path / "lora.gguf", precision="fp32", base="x")
    for key, back in read_gguf_lora(path, plain.config, lora).items():
        torch.testing.assert_close(back.delta(), lora[key].delta())
    last = logits(merge(tiny_model(name), lora))[-1]
    assert float((last - torch.tensor(GOLDEN[name]["base"])).abs().max()) > 0.5
    tolerance = 3e-3 if name.startswith("gemma") else 2e-5
    torch.testing.assert_close(last, torch.tensor(GOLDEN[name]["lora"]), rtol=0, atol=tolerance)
    if architecture_of(name) == "llama":
        _check_as_llama_cpp_applies_it(files(name)[1], path, lora, plain)


def _check_as_llama_cpp_applies_it(base: GgufFile, path: Path, lora: dict[str, LoraModule], plain: nn.Module) -> None:
    """W + alpha / r · B A in llama.cpp's order of rows is the merged weight in that order."""
    adapter = open_gguf(path)
    assert adapter.metadata["general.type"] == "adapter"
    assert adapter.metadata["adapter.type"] == "lora"
    assert adapter.architecture == "llama"
    where = parameter_pieces(base, {n: tuple(v.shape) for n, v in plain.state_dict().items()})
    for key, module in lora.items():
        name = key.removeprefix("language_model.") + ".weight"
        piece = where[name]
        down, up = (
            adapter.raw(f"{piece.key}.lora_{x}").view(torch.float32).view(adapter.tensors[f"{piece.key}.lora_{x}"].shape)
            for x in "ab"
        )
        change = adapter.metadata["adapter.lora.alpha"] / len(down) * up @ down
        stored = base.raw(piece.key).view(torch.float32) + change
        torch.testing.assert_close(piece.cut(stored), plain.get_submodule(key[15:]).weight + module.delta())


def test_stretched_positions_come_from_the_tensors(files):
    assert transformers_config(files("llama-3.1")[1]).rope_parameters["rope_type"] == "llama3"
    long = transformers_config(files("phi3-long")[1])
    assert long.rope_parameters["short_factor"] == pytest.approx([1.0, 1.1, 1.3, 1.5, 2.0, 3.0])


def test_factors_of_an_unknown_rule_are_refused(files, tmp_path):
    path = write_model(tmp_path / "m.gguf", tiny_model("llama-3.1"), "llama-3.1")
    file = open_gguf(path)
    data = bytearray(path.read_bytes())
    at = file.tensors["rope_freqs.weight"].offset
    data[at + 8 : at + 12] = b"\0\0\x40\x40"  # 3.0
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
        transformers_config(open_gguf(path))


def changed(file: GgufFile, **changes: Any) -> GgufFile:
    return GgufFile(file.path, file.version, file.metadata | changes.pop("metadata", {}), changes.pop("tensors", file.tensors))


def test_an_unknown_architecture_is_refused(files):
    file = changed(files("llama")[1], metadata={"general.architecture": "rwkv6"})
    with pytest.raises(SourceError, match="arquitetura rwkv6") as caught:
        transformers_config(file)
    assert "qwen3moe" in caught.value.hint


def test_experts_where_there_should_be_none(files):
    file = files("llama")[1]
    tensors = {**file.tensors, "blk.0.ffn_gate_exps.weight": file.tensors["blk.0.ffn_gate.weight"]}
    with pytest.raises(SourceError, match="MoE"):
        transformers_config(changed(file, tensors=tensors))


def test_missing_misshapen_and_unknown_tensors_are_named_together(files):
    model, file = files("qwen2")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tensors = {name: info for name, info in file.tensors.items() if name != "blk.1.ffn_up.weight"}
    tensors["blk.0.mystery.weight"] = tensors["blk.0.ffn_up.weight"]
    shapes["model.norm.weight"] = (65,)
    with pytest.raises(SourceError) as caught:
        parameter_pieces(changed(file, tensors=tensors), shapes)
    for part in ("blk.1.ffn_up.weight", "blk.0.mystery.weight", "output_norm.weight [64] ≠ [65]"):
        assert part in caught.value.problem


def test_a_key_that_is_missing_is_named(files):
    file = files("llama")[1]
    metadata = {key: value for key, value in file.metadata.items() if key != "llama.block_count"}
    with pytest.raises(SourceError, match=r"llama\.block_count"):
        transformers_config(GgufFile(file.path, 3, metadata, file.tensors))


# -- adapters that llama.cpp cannot load


def test_what_llama_cpp_cannot_load_is_refused_and_nothing_written(files, tmp_path):
    model = files("llama")[0]
    lora, path = tiny_lora(model), tmp_path / "lora.gguf"
    head = LoraModule(torch.ones(2, 64), torch.ones(96, 2), 1.0)
    for wrong, message in (
        ({"language_model.lm_head": head}, "lm_head"),
        ({"language_model.model.layers.0.self_attn.q_proj": LoraModule(head.down, head.up[:64], 1.0, torch.ones(64))}, "DoRA"),
        ({"language_model.model.layers.0.self_attn.q_proj": LoraModule(head.down * torch.nan, head.up[:64], 1.0)}, "finitos"),
    ):
        with pytest.raises(UserError, match=message):
            write_gguf_lora({**lora, **wrong}, model.config, path)
    with pytest.raises(UserError, match="gpt2"):
        write_gguf_lora(lora, type("C", (), {"model_type": "gpt2"})(), path)
    assert not list(tmp_path.iterdir())


def test_half_precision_and_a_missing_module(files, tmp_path):
    model = files("llama")[0]
    lora = tiny_lora(model)
    path = write_gguf_lora(lora, model.config, tmp_path / "lora.gguf")
    assert {info.dtype for info in open_gguf(path).tensors.values()} == {"F16"}
    with pytest.raises(SourceError, match="lm_head"):
        read_gguf_lora(path, model.config, ["language_model.lm_head"])


def test_modelfile():
    assert modelfile("base.gguf", "meu.gguf", context=2048) == (
        "FROM ./base.gguf\nADAPTER ./meu.gguf\nPARAMETER num_ctx 2048\n"
    )
    assert modelfile("llama3.2:1b", "/x/meu.gguf").startswith("FROM llama3.2:1b\nADAPTER /x/meu.gguf\n")
