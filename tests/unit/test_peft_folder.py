"""A PEFT folder gives, loaded by peft onto transformers' own model, the trainer's logits."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from tiny_language_models import open_tiny, save_tiny
from torch import nn
from transformers import AutoModelForCausalLM

from lora_trainer.adapters import Adapter, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import DivergedError, MachineError, SourceError
from lora_trainer.export.peft_folder import PART, save_peft_folder, verify_peft_folder
from lora_trainer.families.causal_lm.family import CausalLM
from lora_trainer.layouts.peft import read_peft_folder

CPU = torch.device("cpu")


def _trained(folder: Path, kind: str = "llama", **settings: Any) -> tuple[CausalLM, nn.ModuleDict, Adapter]:
    save_tiny(folder, kind, gain=1.0)
    family = open_tiny(folder)
    model = family.load_model(CPU, torch.float32)
    options = {"lora_rank": 4, "lora_alpha": 10.0, "lora_targets": "all", **settings}
    adapter = inject(model, family, ModelConfig(**options), 0, formats=("diffusers",))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in key:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
    return family, model, adapter


def _logits_from_peft(base: Path, folder: Path, family: CausalLM) -> torch.Tensor:
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    ids = torch.randint(family.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits: torch.Tensor = loaded(ids).logits
    return logits


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize(
    "settings", [{}, {"rslora": True}, {"dora": True}, {"lora_targets": r"layers\.1\..*_proj|lm_head"}]
)
def test_reloads_as_trained(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    family, model, adapter = _trained(tmp_path / "base", kind, **settings)
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    with torch.no_grad():
        expected = family.probe(model)
        with adapter.disabled():
            assert float((family.probe(model) - expected).abs().max()) > 0.1
    own = _logits_from_peft(tmp_path / "base", folder, family)
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    verify_peft_folder(model, adapter, folder, family.probe)
    with torch.no_grad():
        assert torch.equal(family.probe(model), expected)  # as it went in


def test_the_config_says_what_is_there(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "bf16", {"name": "gato", "passos": "10"})
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str((tmp_path / "base").resolve())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 10, "CAUSAL_LM")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nbase_model: ")
    assert "# gato" in card
    assert "- passos: 10" in card


def test_some_layers_only_are_named_whole(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base", lora_targets=r"layers\.1\.self_attn\.q_proj")
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_fp16_keeps_small_values(tmp_path: Path) -> None:
    """A factor of 1e-7 in B would round away; A takes a power of two of it."""
    family, model, adapter = _trained(tmp_path / "base")
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.mul_(1e-7)
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp16", {})
    live, stored = adapter.export(), read_peft_folder(folder)
    for path, module in stored.items():
        torch.testing.assert_close(module.delta(), live[path].delta(), rtol=1e-2, atol=1e-10)


def test_nothing_is_written_of_a_diverged_adapter(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    before = {path: path.read_bytes() for path in (tmp_path / "lora").iterdir()}
    with torch.no_grad():
        next(iter(adapter.named_parameters().values()))[0, 0] = torch.nan
    with pytest.raises(DivergedError):
        save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    assert {path: path.read_bytes() for path in (tmp_path / "lora").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "lora"]


def test_an_altered_file_does_not_pass(tmp_path: Path) -> None:
    family, model, adapter = _trained(tmp_path / "base")
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    path = folder / "adapter_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"lora_alpha": 10', '"lora_alpha": 20'), encoding="utf-8")
    with pytest.raises(MachineError):
        verify_peft_folder(model, adapter, folder, family.probe)


def test_verifies_on_streamed_packed_blocks_too(tmp_path: Path) -> None:
    from lora_trainer.techniques import MemoryPlan
    from lora_trainer.techniques.block_streaming import BlockStreaming
    from lora_trainer.techniques.embedding_offload import EmbeddingOffload
    from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
    from lora_trainer.techniques.quantize_4bit import Quantize4bit

    save_tiny(tmp_path / "base", "llama", gain=1.0)
    family = open_tiny(tmp_path / "base")
    plan = MemoryPlan((Quantize4bit(), EmbeddingOffload(), BlockStreaming(), GradientCheckpointing()))
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    settings = ModelConfig(lora_rank=4, lora_targets="all")
    adapter = inject(model, family, settings, 0, formats=("diffusers",))  # type: ignore[arg-type]
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.fill_(0.05)
    plan.wrap(model, family.blocks(model))
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    assert verify_peft_folder(model, adapter, folder, family.probe).output_difference < 1e-5
    assert model[PART].get_submodule("model.layers.0.self_attn.q_proj").lora_A["default"].weight.requires_grad


@pytest.mark.parametrize(
    "options",
    [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 32, "layers.1.mlp.up_proj": 1}}, {"alpha_pattern": {r".*\.0\..*": 2}}],
)
def test_strengths_are_read_as_peft_reads_them(tmp_path: Path, options: dict[str, Any]) -> None:
    made = _made_by_peft(tmp_path, **options)
    strengths = {name: m.scaling["default"] for name, m in made.named_modules() if isinstance(m, LoraLayer)}
    read = read_peft_folder(tmp_path / "lora")
    assert {f"base_model.model.{path.removeprefix(f'{PART}.')}": m.scale for path, m in read.items()} == strengths


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}, {"bias": "all"}]
)
def test_what_else_peft_trained_is_not_left_out_unsaid(tmp_path: Path, options: dict[str, Any]) -> None:
    _made_by_peft(tmp_path, **options)
    with pytest.raises(SourceError, match="pesos que não treino"):
        read_peft_folder(tmp_path / "lora")


def test_half_a_module_is_named(tmp_path: Path) -> None:
    _made_by_peft(tmp_path)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({key: x for key, x in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in key}, path)
    with pytest.raises(SourceError, match=r"lora_A ou lora_B de .*layers\.1\.self_attn\.q_proj"):
        read_peft_folder(tmp_path / "lora")


def _made_by_peft(folder: Path, **options: Any) -> peft.PeftModel:
    biased = options.get("bias") is not None
    save_tiny(folder / "base", "qwen2" if biased else "llama", gain=1.0)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], **options}
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    model.save_pretrained(folder / "lora")
    return model
