"""int8 files of ComfyUI's, plain and turned (ConvRot): the weights come back, whole files train, others are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bases
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.bases import int8 as _int8
from lora_trainer.bases.weights import Weights
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.qwen_image_21.family import QwenImage21

CPU = torch.device("cpu")


def rotation(size: int) -> Tensor:
    """By signs alone: an entry is negative for each digit in base 4 in which row and column mirror each other."""
    digits = [[(number // 4**place) % 4 for place in range(8)] for number in range(size)]
    places = int(np.log2(size)) // 2
    signs = [[(-1) ** sum(a[p] + b[p] == 3 for p in range(places)) for b in digits] for a in digits]
    return torch.tensor(signs) / size**0.5


def to_int8(state: dict[str, Tensor], group: int | None, *, one_scale: bool = False) -> dict[str, Tensor]:
    """Matrices as ComfyUI keeps them; those that do not divide into groups are not turned."""
    small: dict[str, Tensor] = {}
    for key, value in state.items():
        if value.ndim != 2 or not any(word in key for word in ("attn", "mlp")):
            small[key] = value.clone()
            continue
        turns = group is not None and value.shape[1] % group == 0
        turned = (value.view(len(value), -1, group) @ rotation(group)).reshape(value.shape) if group and turns else value
        scale = (turned.abs().amax() if one_scale else turned.abs().amax(1, keepdim=True)) / 127
        told = {"format": "int8_tensorwise", **({"convrot": True, "convrot_groupsize": group} if turns else {})}
        stem = key.removesuffix("weight")
        small |= {key: (turned / scale).round().to(torch.int8), f"{stem}weight_scale": scale.float()}
        small[f"{stem}comfy_quant"] = torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)
    return small


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("group", [None, 16, 64])
def test_the_weights_come_back(tmp_path, group, one_scale):
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(0))
    save_file(to_int8({"a.attn.weight": weight}, group, one_scale=one_scale), tmp_path / "x.safetensors")
    weights = Weights.open([tmp_path / "x.safetensors"], "x")
    assert weights.readable("a.attn.weight")
    assert weights.companions("a.attn.weight") == ["a.attn.comfy_quant", "a.attn.weight_scale"]
    error = (weights.value("a.attn.weight") - weight).abs().max()
    assert error < 0.02 * weight.abs().max()


def test_turned_weights_do_what_turned_inputs_do(tmp_path):
    """ComfyUI turns the input instead: the same product."""
    weight, x = torch.randn(8, 256), torch.randn(3, 256)
    state = to_int8({"a.attn.weight": weight}, 256)
    save_file(state, tmp_path / "x.safetensors")
    ours = x @ Weights.open([tmp_path / "x.safetensors"], "x").value("a.attn.weight").T
    theirs = (x @ rotation(256)) @ (state["a.attn.weight"].float() * state["a.attn.weight_scale"]).T
    assert torch.allclose(ours, theirs, atol=1e-4)


def int8_files(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Qwen-Image 2.1, most of whose people have these."""
    options, modules = bases.written("qwen_image_21", "fp32")
    for part in ("base_model", "text_encoder"):
        save_file(to_int8(load_file(options[part]), 64), folder / f"{part}.safetensors")
    parts = {part: str(folder / f"{part}.safetensors") for part in ("base_model", "text_encoder")}
    return {**options, **parts}, modules


def test_a_base_of_int8(tmp_path):
    options, modules = int8_files(tmp_path)
    family = resolve(ModelConfig(**options), DataConfig())
    assert any("int8" in notice for notice in family.notices)
    assert isinstance(family, QwenImage21)
    model = {**family.load_model(CPU, torch.float32), **family.load_text_encoders(CPU, torch.float32)}
    for part, module in model.items():
        own = modules[part].state_dict()
        for key, value in module.state_dict().items():
            assert (value - own[key]).abs().max() <= 0.02 * own[key].abs().max(), key
    family.configure(TrainingConfig(), DataConfig())
    plain = resolve(ModelConfig(**bases.plain("qwen_image_21")), DataConfig())
    assert family.num_bytes(torch.bfloat16) >= plain.num_bytes(torch.bfloat16)


def test_int8_of_another_making_is_refused(tmp_path):
    options, _ = int8_files(tmp_path)
    state = load_file(options["base_model"])
    other = torch.tensor([*b'{"format": "int8_blockwise"}'], dtype=torch.uint8)
    state |= {key: other.clone() for key in state if key.endswith("comfy_quant")}
    save_file(state, tmp_path / "y.safetensors")
    with pytest.raises(SourceError, match=r"quantizados .*\(I8\)"):
        resolve(ModelConfig(**{**options, "base_model": str(tmp_path / "y.safetensors")}), DataConfig())


def test_the_matrix_is_its_own_inverse():
    assert torch.allclose(_int8._hadamard(64), rotation(64))
    assert torch.allclose(_int8._hadamard(256) @ _int8._hadamard(256), torch.eye(256), atol=1e-5)
