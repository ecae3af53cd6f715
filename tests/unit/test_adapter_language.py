"""PiSSA and rules on language models: what peft, llama.cpp and a merged model make of the files; LoHa and LoKr refused."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_language_models import open_tiny, save_tiny
from transformers import AutoModelForCausalLM

from lora_trainer.adapters import check_targets, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import ConfigError
from lora_trainer.export.gguf_lora import read_gguf_lora, write_gguf_lora
from lora_trainer.export.merge import merge
from lora_trainer.export.peft_folder import PART, save_peft_folder, verify_peft_folder

CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "pissa": {"lora_init": "pissa"},
    "rules": {"lora_rules": [{"target": r"layers\.1\.", "rank": 2, "alpha": 3}, {"target": "q_proj", "rank": 8, "rate": 1e-5}]},
}


def trained(folder: Path, kind: str) -> Any:
    save_tiny(folder, "llama", gain=1.0)
    family = open_tiny(folder)
    model = family.load_model(CPU, torch.float32)
    adapter = inject(model, family, ModelConfig(lora_rank=4, lora_alpha=10, lora_targets="all", **SETTINGS[kind]), 0, ("peft",))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return family, model, adapter


@torch.no_grad()
@pytest.mark.parametrize("kind", SETTINGS)
def test_every_file_gives_the_trained_answers(kind, tmp_path):
    family, model, adapter = trained(tmp_path / "base", kind)
    expected = family.probe(model)
    folder = save_peft_folder(model, adapter, family, tmp_path / "lora", "fp32", {})
    found = verify_peft_folder(model, adapter, folder, family.probe)
    assert found.effect > 0.01
    ids = torch.randint(family.config.vocab_size, (1, 16), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()(ids).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    merged = merge(family, adapter.export(), tmp_path / "merged", torch.float32).folder
    logits = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    lora = {path.removeprefix(f"{PART}."): module for path, module in adapter.export().items()}
    path = write_gguf_lora(lora, family.config, tmp_path / "x.gguf", precision="fp32")
    for name, module in read_gguf_lora(path, family.config, list(lora)).items():
        torch.testing.assert_close(module.delta(), lora[name].delta(), rtol=1e-4, atol=1e-6)
    assert torch.equal(family.probe(model), expected), "as it went in"


def test_ranks_by_layer(tmp_path):
    _, _, adapter = trained(tmp_path / "base", "rules")
    ranks = {path.removeprefix(f"{PART}.model.layers."): module.rank for path, module in adapter.export().items()}
    assert (ranks["0.self_attn.q_proj"], ranks["1.self_attn.q_proj"], ranks["0.mlp.up_proj"]) == (8, 2, 4)
    assert set(adapter.rates.values()) == {1e-5}
    assert {module.rank for module in trained(tmp_path / "other", "pissa")[2].export().values()} == {8}


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_kinds_of_image_models_are_refused_by_name(kind, tmp_path):
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="é só para modelos de imagem"):
        check_targets(open_tiny(tmp_path), ModelConfig(adapter_kind=kind), ("peft",))
