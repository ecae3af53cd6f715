"""Kohya's fused layout: taken apart by diffusers as our own layout is, and read back exactly."""

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from diffusers.loaders import FluxLoraLoaderMixin
from safetensors.torch import save_file

from lora_trainer.families.flux import names
from lora_trainer.layouts import LoraModule, diffusers, fused, read_lora

RELEASED, BLOCKS = 3072, 2
DOUBLE = "transformer.transformer_blocks.0."
SINGLE = "transformer.single_transformer_blocks.1."


def slot(width: int, path: str) -> fused.Slot | None:
    return names.FLUX.places(BLOCKS).slot(path.removeprefix("transformer."), width)


def lora(width: int, *, mlp: bool, rank: int = 2, scale: float = 0.5) -> dict[str, LoraModule]:
    """`mlp`: all layers of two blocks, else their attention only."""
    outs: dict[str, tuple[int, int]] = {f"{DOUBLE}attn.{name}": (width, width) for name in (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}  # fmt: skip
    outs |= {f"{SINGLE}attn.{name}": (width, width) for name in ("to_q", "to_k", "to_v")}
    if mlp:
        outs |= {f"{DOUBLE}ff.net.0.proj": (4 * width, width), f"{DOUBLE}ff_context.net.2": (width, 4 * width)}
        outs |= {f"{DOUBLE}norm1.linear": (6 * width, width), f"{SINGLE}norm.linear": (3 * width, width)}
        outs |= {f"{SINGLE}proj_mlp": (4 * width, width), f"{SINGLE}proj_out": (width, 5 * width)}
    torch.manual_seed(0)
    return {p: LoraModule(torch.randn(rank, i), torch.randn(o, rank), scale) for p, (o, i) in outs.items()}



@pytest.mark.parametrize("mlp", [True, False])
def test_diffusers_takes_the_file_apart_as_ours(mlp):
    ours = lora(RELEASED, mlp=mlp)
    state: dict[str, Any] = FluxLoraLoaderMixin.lora_state_dict(fused.pack(ours, functools.partial(slot, RELEASED)))
    expected = diffusers.pack(ours)
    for path in ours:
        theirs, own = (s[f"{path}.lora_B.weight"] @ s[f"{path}.lora_A.weight"] for s in (state, expected))
        assert theirs.sub_(own).abs_().max() <= 1e-5, path
    extra = {key.partition(".lora_")[0] for key in state} - ours.keys()
    assert extra == (set() if mlp else {f"{SINGLE}proj_mlp"})
    assert not any(bool(state[f"{path}.lora_B.weight"].any()) for path in extra), "a part without a LoRA is all zero"


@pytest.mark.parametrize("mlp", [True, False])
def test_read_back_exactly(mlp):
    ours, slots = lora(16, mlp=mlp), functools.partial(slot, 16)
    tensors = fused.pack(ours, slots)
    back, strangers = fused.unpack(tensors, list(ours), slots)
    assert strangers == []
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[path].delta(), ours[path].delta()) for path in ours)
    assert {module.rank for module in back.values()} == {2}


def test_kohyas_own_files_share_one_down_matrix():
    """sd-scripts trains the fused matrix as one: each of our modules gets its rows and the whole `down`."""
    width, name = 16, "lora_unet_double_blocks_0_img_attn_qkv"
    whole = LoraModule(torch.randn(4, width), torch.randn(3 * width, 4), 0.25)
    tensors = {f"{name}.lora_down.weight": whole.down, f"{name}.lora_up.weight": whole.up, f"{name}.alpha": torch.tensor(1.0)}
    paths = [f"{DOUBLE}attn.to_{letter}" for letter in "qkv"]
    back, strangers = fused.unpack(tensors, paths, functools.partial(slot, width))
    assert strangers == []
    assert torch.allclose(torch.cat([back[path].delta() for path in paths]), whole.delta())
    found, strangers = fused.unpack(tensors, paths[:2], functools.partial(slot, width))
    assert list(found) == paths[:2]
    assert strangers == [f"{name} [2]"], "v's change would be lost: it is told"


def test_layers_that_have_no_place_are_told():
    assert slot(16, f"{DOUBLE}attn.norm_q") is not None
    assert slot(16, "transformer.pos_embed") is None


def _named(spell: Callable[[str], str], down: str, up: str) -> dict[str, torch.Tensor]:
    modules = lora(16, mlp=True, scale=1.0)
    return {f"{spell(path.removeprefix('transformer.'))}.{leaf}": tensor.contiguous() for path, module in modules.items()
            for leaf, tensor in ((down, module.down), (up, module.up))}  # fmt: skip


PEFT, KOHYA = ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")
OTHER_PROGRAMS: dict[str, tuple[Callable[[str], str], tuple[str, str]]] = {
    "DiffSynth": (lambda name: name, ("lora_A.default.weight", "lora_B.default.weight")),
    "peft": (lambda name: f"base_model.model.{name}", PEFT),
    "ComfyUI": (lambda name: f"diffusion_model.{name}", PEFT),
    "SimpleTuner": (lambda name: f"lycoris_{name.replace('.', '_')}", KOHYA),
    "OneTrainer": (lambda name: f"lora_transformer_{name.replace('.', '_')}", KOHYA),
    "musubi-tuner": (lambda name: f"lora_unet_{name.replace('.', '_')}", KOHYA),
}


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_files_of_other_programs(program, tmp_path):
    spell, sides = OTHER_PROGRAMS[program]
    save_file(_named(spell, *sides), tmp_path / "adapter_model.safetensors")
    ours, slots = lora(16, mlp=True, scale=1.0), functools.partial(slot, 16)
    file = read_lora(tmp_path / "adapter_model.safetensors", list(ours), {"transformer": "lora_unet"}, slots=slots)
    assert file.strangers == []
    assert file.lora.keys() == ours.keys()
    assert all(torch.equal(file.lora[path].delta(), ours[path].delta()) for path in ours)


def test_the_originals_names_without_comfyuis_word(tmp_path):
    ours, slots = lora(16, mlp=True), functools.partial(slot, 16)
    dotted = {f"lora_unet_{name.replace('.', '_')}": name for name in _original_names(ours)}
    packed = fused.pack(ours, slots)
    state = {dotted[key.partition(".")[0]] + "." + key.partition(".")[2]: value for key, value in packed.items()}
    save_file(state, tmp_path / "x.safetensors")
    file = read_lora(tmp_path / "x.safetensors", list(ours), {"transformer": "lora_unet"}, slots=slots)
    assert file.strangers == []
    assert all(torch.equal(file.lora[path].delta(), ours[path].delta()) for path in ours)


def _original_names(paths: Iterable[str]) -> set[str]:
    pieces = names.FLUX.places(BLOCKS).pieces
    return {pieces[f"{path.removeprefix('transformer.')}.weight"].key.removesuffix(".weight") for path in paths}


def test_alpha_from_pefts_config_beside_the_file(tmp_path):
    """peft writes alpha nowhere else."""
    spell, sides = OTHER_PROGRAMS["peft"]
    save_file(_named(spell, *sides), tmp_path / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 1, "alpha_pattern": {f"{DOUBLE.removeprefix('transformer.')}attn.to_q": 6}, "use_dora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    paths, slots = list(lora(16, mlp=True)), functools.partial(slot, 16)
    file = read_lora(tmp_path / "adapter_model.safetensors", paths, {"transformer": "lora_unet"}, slots=slots)
    assert {path: module.scale for path, module in file.lora.items() if module.scale != 0.5} == {f"{DOUBLE}attn.to_q": 3.0}
