"""The LoRA that a base wears while it trains: read in every layout, refused by name, and the same as if it were merged."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import plain
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer import adapters
from lora_trainer.adapters import training_lora
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.engine.block_streaming import streaming_report
from lora_trainer.engine.branch import Branch, taken_off
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing
from lora_trainer.techniques.quantize_4bit import Quantize4bit

CPU = torch.device("cpu")
NAMES = ("flux", "z_image")
LOW_VRAM = (GradientCheckpointing(), BlockStreaming(), ActivationOffload(min_bytes=1))


def opened(name: str, **more: Any) -> Any:
    family: Any = resolve(ModelConfig(**{**plain(name), **more}), DataConfig())
    family.configure(TrainingConfig(), DataConfig())
    return family


@cache
def deltas(name: str, rank: int = 3, scale: float = 1.0) -> dict[str, tuple[Tensor, Tensor]]:
    """Path -> (down, up) of every layer in the blocks."""
    model, family = opened(name).load_model(torch.device("meta"), torch.float32), opened(name)
    paths = adapters.find_targets(model, family, ModelConfig(lora_targets="all"), ("diffusers",))
    layers: dict[str, Any] = dict(model.named_modules())
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return scale * 0.1 * torch.randn(*shape, generator=generator)

    return {path: (draw(rank, layers[path].in_features), draw(layers[path].out_features, rank)) for path in paths}


def write(path: Path, lora: dict[str, tuple[Tensor, Tensor]], start: str = "transformer.") -> str:
    tensors = {}
    for name, (down, up) in lora.items():
        key = start + name.removeprefix("transformer.")
        tensors |= {f"{key}.lora_A.weight": down.clone(), f"{key}.lora_B.weight": up.clone()}
    save_file(tensors, path)
    return str(path)


def batch_of(family: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = family.example_batch(2, (64, 32))
    drawn = {k: torch.randn(v.shape, generator=generator) for k, v in batch.items() if v.is_floating_point() and k != "weight"}
    return {**batch, **drawn, "seeds": torch.tensor([3, 4])}


def worn(family: Any, settings: ModelConfig) -> nn.ModuleDict:
    model: nn.ModuleDict = family.load_model(CPU, torch.float32)
    training_lora.wear(model, family, settings, torch.float32)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_it_is_the_merged_base_and_comes_off(tmp_path, name):
    lora, family = deltas(name), opened(name)
    settings = ModelConfig(training_lora=write(tmp_path / "x.safetensors", lora))
    model, bare, merged = worn(family, settings), family.load_model(CPU, torch.float32), family.load_model(CPU, torch.float32)
    for path, (down, up) in lora.items():
        merged.get_submodule(path).weight += up @ down
    batch = batch_of(family)
    with_it, without, expected = (family.loss(one, batch) for one in (model, bare, merged))
    assert with_it.item() == pytest.approx(expected.item(), rel=1e-4)
    assert with_it.item() != pytest.approx(without.item(), rel=1e-3)
    with taken_off(model):
        assert family.loss(model, batch).item() == without.item()
    assert family.loss(model, batch).item() == with_it.item(), "on again"
    assert not any("training_branch" in key for key in model.state_dict())


WORDS = {
    "diffusers": ("transformer.", "lora_A", "lora_B"),
    "comfyui": ("diffusion_model.", "lora_A", "lora_B"),
    "peft": ("base_model.model.", "lora_A", "lora_B"),
    "DiffSynth": ("", "lora_A.default", "lora_B.default"),
    "lightx2v": ("", "lora_down", "lora_up"),
}
"""Who writes files so -> what stands before diffusers' name of a module, and the words for the two matrices."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [*WORDS, "lora_unet", "lora_transformer", "kohya", "original"])
def test_every_layout_is_read(tmp_path, name, layout):
    from lora_trainer.layouts import LoraModule
    from lora_trainer.layouts.fused import pack

    lora, family = deltas(name), opened(name)
    path = tmp_path / "x.safetensors"
    if layout in WORDS:
        prefix, down_word, up_word = WORDS[layout]
        write(path, lora, prefix)
        renamed = {key.replace("lora_A", down_word).replace("lora_B", up_word): v for key, v in load_file(path).items()}
        save_file(renamed, path)
    elif layout.startswith("lora_"):  # kohya's words on diffusers' modules, unfused, as musubi-tuner and OneTrainer write them
        tensors = {}
        for name_, (down, up) in lora.items():
            key = f"{layout}_{name_.removeprefix('transformer.').replace('.', '_')}"
            tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": 2 * up, f"{key}.alpha": torch.tensor(1.5)}
        save_file(tensors, path)
    else:
        fusable = {name_: pair for name_, pair in lora.items() if family.kohya_slots(name_)}
        packed = pack({name_: LoraModule(down, up, 1.0) for name_, (down, up) in fusable.items()}, family.kohya_slots)
        if layout == "original":  # the model's own names in ComfyUI's words
            packed = {in_comfyui(name, key): value for key, value in packed.items()}
        save_file(packed, path)
        lora = fusable
    model = worn(family, ModelConfig(training_lora=str(path)))
    for name_, (down, up) in lora.items():
        branch: Any = model.get_submodule(name_).training_branch
        assert torch.allclose(branch.up @ branch.down, up @ down, atol=1e-5), name_


def in_comfyui(name: str, key: str) -> str:
    names = dotted(load_file(plain(name)["base_model"]).keys())
    stem, _, leaf = key.partition(".")
    leaf = leaf.replace("lora_down", "lora_A").replace("lora_up", "lora_B")
    return f"diffusion_model.{names[stem.removeprefix('lora_unet_')]}.{leaf}"


def dotted(keys: Iterable[str]) -> dict[str, str]:
    """Without dots -> with them."""
    return {key.rpartition(".")[0].replace(".", "_"): key.rpartition(".")[0] for key in keys}


def test_other_files_are_refused(tmp_path):
    family = opened("z_image")

    def refused(path: str, said: str) -> None:
        with pytest.raises(SourceError, match=said):
            training_lora.check(family, ModelConfig(training_lora=path))

    refused(write(tmp_path / "flux.safetensors", deltas("flux")), r"não é um LoRA comum deste modelo base \(Z-Image\)")
    wide = {name: (torch.randn(2, 7), up[:, :2]) for name, (_, up) in deltas("z_image").items()}
    refused(write(tmp_path / "wide.safetensors", wide), "não encaixam")
    refused(plain("z_image")["base_model"], "não tem camadas LoRA")
    refused(str(tmp_path), "não é um arquivo")
    holes = {name: (down * torch.nan, up) for name, (down, up) in deltas("z_image").items()}
    refused(write(tmp_path / "nan.safetensors", holes), "NaN")
    assert training_lora.check(family, ModelConfig()) == []
    [said] = training_lora.check(family, ModelConfig(training_lora=write(tmp_path / "good.safetensors", deltas("z_image"))))
    assert "good.safetensors" in said


def trained(family: Any, settings: ModelConfig, *techniques: Any) -> tuple[float, Tensor]:
    """Loss and gradients of one batch, as a run makes them."""
    plan = MemoryPlan(techniques)
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    training_lora.wear(model, family, settings, torch.float32)
    groups = family.blocks(model)
    adapter = adapters.inject(model, family, ModelConfig(lora_rank=2), seed=0, formats=("diffusers",))
    parameters = adapter.named_parameters()
    with torch.no_grad():
        for key, parameter in parameters.items():
            if "lora_B" in key:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(key)))
    plan.wrap(model, groups)
    with plan.step_context():
        loss = family.loss(model, batch_of(family))
    loss.backward()
    if BlockStreaming() in techniques:
        assert streaming_report(model) is not None
        branches = [m for m in model.modules() if isinstance(m, Branch) and hasattr(m, "home")]
        assert len(branches) == len(deltas(family.name)), "they stream with their layers"
    return loss.item(), torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])


@pytest.mark.parametrize("name", NAMES)
def test_techniques_change_no_number(tmp_path, name):
    family = opened(name)
    settings = ModelConfig(training_lora=write(tmp_path / "x.safetensors", deltas(name)))
    loss, gradients = trained(family, settings)
    low_loss, low_gradients = trained(family, settings, *LOW_VRAM)
    assert low_loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(low_gradients, gradients, atol=1e-5 * float(gradients.abs().max()))
    bare, _ = trained(family, ModelConfig())
    assert bare != pytest.approx(loss, rel=1e-3)


def test_a_quantised_base_keeps_it_whole(tmp_path):
    """nf4 is the base's, not the branch's: what it adds is the same as on the plain base."""
    family = opened("z_image")
    lora = deltas("z_image")
    settings = ModelConfig(training_lora=write(tmp_path / "x.safetensors", lora))
    model = family.load_model(CPU, torch.float32, prepare=lambda m: Quantize4bit().convert(m, family.blocks(m)))
    training_lora.wear(model, family, settings, torch.float32)
    path = "transformer.layers.0.attention.to_q"
    layer, (down, up) = model.get_submodule(path), lora[path]
    x = torch.randn(2, 5, layer.in_features)
    with taken_off(model):
        before = layer(x)
    assert torch.allclose(layer(x) - before, x @ down.T @ up.T, atol=1e-4)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_plan_counts_it(tmp_path, streamed):
    """Predicted against tracked peaks of whole steps."""
    from helpers.measured_run import PHASES, Case, measure, predict

    low = {"block_streaming": 1.0, "activation_offload": "yes"} if streamed else {}
    files = {**plain("z_image"), "training_lora": write(tmp_path / "x.safetensors", deltas("z_image"))}
    training = {"gradient_checkpointing": "yes" if streamed else "no"}
    options = {"model": files, "memory": low, "training": training, "data": {"max_caption_tokens": 128}}
    case, base = Case("z_image", (128, 128), options=options), Path(files["base_model"])
    predicted, real = predict(case, base).phases, measure(case, base).phases
    for phase in PHASES:
        assert predicted[phase].total == pytest.approx(real[phase].total, rel=0.01), phase
        assert predicted[phase].causes["frozen"] == real[phase].causes["frozen"] or phase == "load"
    without = Case("z_image", (128, 128), options={**options, "model": plain("z_image")})
    assert predict(without, base).phases["forward"].causes["frozen"] < predicted["forward"].causes["frozen"]
