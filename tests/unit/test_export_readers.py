"""The final oracle: what diffusers' own pipelines make of our files equals what the trainer computes (G01, G05)."""

from types import SimpleNamespace

import pytest
import torch
from adapter_models import MODELS, SD15, forward, perturb, pipeline, sd15_model, trained
from helpers.counts import recomputations
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.diffusion.unet import block_groups
from lora_trainer.errors import DivergedError, MachineError, set_language
from lora_trainer.export.proof import check_consumer
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.families import family_class
from lora_trainer.layouts.readers import loader_for, unreadable
from lora_trainer.plugins import available
from lora_trainer.techniques.gradient_checkpointing import TECHNIQUE

CASES = {
    "attention": {"lora_rank": 4, "lora_alpha": 8},
    "alpha 1": {"lora_rank": 16, "lora_alpha": 1},
    "everything": {"lora_rank": 4, "lora_alpha": 8, "lora_targets": "all", "train_text_encoder": True},
    "conv rank": {"lora_rank": 8, "lora_alpha": 4, "conv_rank": 2, "conv_alpha": 3, "lora_targets": "all",
                  "train_text_encoder": True},
    "mostly convolutions": {"lora_rank": 4, "lora_alpha": 4, "conv_alpha": 1,
                            "lora_targets": r"resnets.*conv\d|mid_block.*attn2\.to_"},
    "rslora": {"lora_rank": 8, "lora_alpha": 4, "rslora": True, "conv_rank": 4, "lora_targets": "all"},
}  # fmt: skip
DORA = {"lora_rank": 4, "lora_alpha": 8, "dora": True, "lora_targets": "all", "train_text_encoder": True}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", MODELS)
def test_pipeline_loads_what_was_trained(name, layout, case, tmp_path):
    model, adapter, family = trained(name, **CASES[case])
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp32", family.metadata())
    with torch.no_grad():
        ours = forward(model)
        fresh = MODELS[name][0]()
        base = forward(fresh)
        pipeline(name, fresh).load_lora_weights(str(path))
        theirs = forward(fresh)
    scale = ours.abs().max()
    assert (ours - base).abs().max() / scale > 0.003
    assert (ours - theirs).abs().max() / scale < 1e-4


def test_dora_in_the_diffusers_layout(tmp_path):
    model, adapter, family = trained("sdxl", **DORA)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    with torch.no_grad():
        ours = forward(model)
        fresh = MODELS["sdxl"][0]()
        pipeline("sdxl", fresh).load_lora_weights(str(path))
        assert (ours - forward(fresh)).abs().max() / ours.abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_verify_tells_what_diffusers_makes_of_dora_in_a_kohya_file(name, tmp_path):
    model, adapter, family = trained(name, **DORA)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    found = verify(model, adapter, family, path, forward)
    with torch.no_grad():
        ours = forward(model)
        fresh = MODELS[name][0]()
        base = forward(fresh)
        pipeline(name, fresh).load_lora_weights(str(path))
        theirs = forward(fresh)
    scale = ours.abs().max()
    real = float((ours - theirs).abs().max() / scale)
    assert real > 0.01
    assert found.output_difference == pytest.approx(real, rel=0.01)
    assert found.effect == pytest.approx(float((theirs - base).abs().max() / base.abs().max()), rel=0.01)
    assert f"{100 * found.output_difference:.1f} %" in found.notice
    assert found.notice in found.line("5/5")
    assert f"difere {found.output_difference:.1e}" in found.line("5/5")
    assert found.delta_difference < 1e-5


def test_a_wrong_magnitude_in_a_kohya_file_is_still_an_error(tmp_path):
    model, adapter, family = trained("sd15", **DORA)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    tensors = load_file(path)
    tensors[next(key for key in tensors if key.endswith("dora_scale"))] *= 1.1
    save_file(tensors, path)
    with pytest.raises(MachineError, match="não é o LoRA treinado"):
        verify(model, adapter, family, path, forward)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_called_unreadable_are_those_that_diffusers_does_not_load(name, layout, tmp_path):
    model, family = MODELS[name][0](), MODELS[name][1]
    adapter = inject(model, family, ModelConfig(lora_rank=2, lora_targets="."), 0, ["diffusers"])
    perturb(adapter)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp32", {})
    fresh = MODELS[name][0]()
    pipeline(name, fresh).load_lora_weights(str(path))
    loaded = {path for path, module in fresh.named_modules() if isinstance(module, LoraLayer)}
    lost = unreadable(list(adapter.layers), family, [layout], fresh["unet"].config)
    assert set(lost) == adapter.layers.keys() - loaded
    assert bool(lost) == (name == "sdxl" and layout == "kohya")


VERIFIED = [("sd15", case, "fp32") for case in [*CASES, "dora"]]
VERIFIED += [("sdxl", case, "fp32") for case in ("everything", "conv rank", "dora")]
VERIFIED += [("sd15", case, "fp16") for case in ("attention", "conv rank", "dora")] + [("sdxl", "everything", "bf16")]


@pytest.mark.parametrize(("name", "case", "precision"), VERIFIED)
def test_verify(name, case, precision, tmp_path):
    model, adapter, family = trained(name, **CASES.get(case, DORA))
    with torch.no_grad():
        before = forward(model)
    state, noise = adapter.state_dict(), torch.random.get_rng_state()
    modes = [module.training for module in model.modules()]
    for layout in ("kohya", "diffusers"):
        path = save_adapter(adapter, family, tmp_path / f"{layout}.safetensors", layout, precision, {})
        found = verify(model, adapter, family, path, forward)
        assert found.num_modules == adapter.num_modules
        assert found.effect > 0.003
        assert ("ignora o DoRA" in found.notice) == (case == "dora" and layout == "kohya")
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[key]) for key, value in adapter.state_dict().items())
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in adapter.named_parameters().values()
    }
    with torch.no_grad():
        assert torch.equal(forward(model), before)


def test_verify_on_a_half_precision_base(tmp_path):
    model, family = sd15_model().to(torch.bfloat16), MODELS["sd15"][1]
    adapter = inject(model, family, ModelConfig(lora_rank=4, lora_alpha=8, lora_targets="all"), 0)
    perturb(adapter)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    found = verify(model, adapter, family, path, lambda m: forward(m, torch.bfloat16))
    assert found.output_difference < 0.05 < found.effect
    assert all(p.dtype == torch.float32 for p in adapter.named_parameters().values())


def test_verify_of_an_untrained_adapter_says_it_has_no_effect(tmp_path):
    model, family = sd15_model(), MODELS["sd15"][1]
    adapter = inject(model, family, ModelConfig(lora_rank=2), 0)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    found = verify(model, adapter, family, path, forward)
    assert found.effect == 0
    assert "não muda" in found.notice


@pytest.mark.parametrize("damage", ["alpha", "up", "missing", "renamed"])
def test_verify_refuses_a_file_that_is_not_the_adapter(damage, tmp_path):
    model, adapter, family = trained("sd15", lora_rank=4, lora_alpha=8)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {})
    tensors = load_file(path)
    name = next(key for key in tensors if key.endswith(".alpha")).removesuffix(".alpha")
    if damage == "alpha":
        tensors[f"{name}.alpha"] = torch.tensor(4.0)
    elif damage == "up":
        tensors[f"{name}.lora_up.weight"][0] += 0.01
    elif damage == "missing":
        tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    else:
        tensors = {key.replace("lora_unet_", "lora_te_"): value for key, value in tensors.items()}
    save_file(tensors, path)
    before = adapter.state_dict()
    with pytest.raises(MachineError, match="não é o LoRA treinado"):
        verify(model, adapter, family, path, forward)
    assert all(torch.equal(value, before[key]) for key, value in adapter.state_dict().items())


def test_a_layer_that_the_loader_scales_otherwise_is_found(tmp_path):
    """Even where the probe's output would not show it: each loaded layer is compared with the file."""
    lora = trained("sd15", lora_rank=4, lora_alpha=8, train_text_encoder=True)[1].export()
    same, _, _ = trained("sd15", lora_rank=4, lora_alpha=8, train_text_encoder=True)
    assert check_consumer(same, lora, tmp_path) == torch.float32
    other, _, _ = trained("sd15", lora_rank=4, lora_alpha=4, train_text_encoder=True)
    with pytest.raises(MachineError, match="diffusers, unet"):
        check_consumer(other, lora, tmp_path)
    without_text, _, _ = trained("sd15", lora_rank=4, lora_alpha=8)
    with pytest.raises(MachineError, match="diffusers: "):
        check_consumer(without_text, lora, tmp_path)


def test_verify_refuses_nan_in_the_file(tmp_path):
    model, adapter, family = trained("sd15", lora_rank=2)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    tensors = load_file(path)
    next(iter(tensors.values()))[0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(DivergedError, match="NaN"):
        verify(model, adapter, family, path, forward)


def test_an_error_in_the_probe_leaves_everything_in_place(tmp_path):
    model, adapter, family = trained("sd15", lora_rank=2, train_text_encoder=True)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    with torch.no_grad():
        before = forward(model)
    calls = []

    def second_call_fails(probed):
        calls.append(probed)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("probe")
        return forward(probed)

    with pytest.raises(torch.OutOfMemoryError):
        verify(model, adapter, family, path, second_call_fails)
    with torch.no_grad():
        assert torch.equal(forward(model), before)
    assert verify(model, adapter, family, path, forward).effect > 0


def test_verify_under_autocast(tmp_path):
    model, adapter, family = trained("sd15", lora_rank=4, lora_alpha=3)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp16", {})

    def probe(probed):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward(probed)

    assert verify(model, adapter, family, path, probe).output_difference < 0.05


def test_training_goes_on_after_verify(tmp_path):
    """The optimizer's parameters are still those of the model, and checkpointing still wraps its blocks."""
    model, adapter, family = trained("sd15", lora_rank=2, train_text_encoder=True)
    TECHNIQUE().wrap(model, block_groups(model))
    optimizer = torch.optim.SGD(adapter.named_parameters().values(), lr=1.0)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    verify(model, adapter, family, path, forward)
    before = adapter.state_dict()
    forward(model).square().mean().backward()
    optimizer.step()
    assert recomputations(model) > 0
    after = adapter.state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert {key.partition(".")[0] for key in moved} == {"unet", "text_encoder"}


# -- which loader, and where there is none


def of_pipeline(name, usual="StableDiffusionPipeline", **changed):
    """SD 1.5 whose base's model_index.json names a pipeline."""
    family = SimpleNamespace(**{**{key: getattr(SD15, key) for key in ("formats", "loader_kinds", "kohya_slots")}, **changed})
    family.pipeline, family.source = usual, SimpleNamespace(config={"model_index": {"_class_name": name}}.get)
    return family


@pytest.mark.parametrize(
    ("own", "usual", "loader"),
    [
        ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLLoraLoaderMixin"),
        ("FluxKontextPipeline", "FluxPipeline", "FluxLoraLoaderMixin"),
        ("Flux2KleinPipeline", "Flux2Pipeline", "Flux2LoraLoaderMixin"),
        ("ChromaPipeline", "ChromaPipeline", "FluxLoraLoaderMixin"),
        ("PixArtSigmaPipeline", "PixArtSigmaPipeline", None),
        ("APipelineOfSomebodys", "StableDiffusion3Pipeline", "SD3LoraLoaderMixin"),
        (["its_module", "ItsPipeline"], "ZImagePipeline", "ZImageLoraLoaderMixin"),
        ("DiffusionPipeline", "QwenImagePipeline", "QwenImageLoraLoaderMixin"),
        ("UNet2DConditionModel", "StableDiffusionPipeline", "StableDiffusionLoraLoaderMixin"),
        (None, "StableDiffusionPipeline", "StableDiffusionLoraLoaderMixin"),
    ],
)
def test_the_loader_is_that_of_the_users_pipeline(own, usual, loader):
    assert getattr(loader_for(of_pipeline(own, usual)), "__name__", None) == loader


@pytest.mark.parametrize("name", [name for name in available("lora_trainer.families") if family_class(name).pipeline])
def test_every_image_familys_usual_pipeline_has_a_loader_or_says_so(name):
    family = family_class(name)
    loader = loader_for(of_pipeline(None, family.pipeline))
    assert (loader is not None) == any("diffusers" in programs for programs in family.formats.values())


@pytest.mark.parametrize(("language", "words"), [("pt", "não tem carregador de LoRA para"), ("en", "has no LoRA loader for")])
@pytest.mark.parametrize("case", ["everything", "dora"])
def test_a_pipeline_without_a_loader_is_told_and_the_file_proved_all_the_same(case, language, words, tmp_path):
    model, adapter, _ = trained("sd15", **CASES.get(case, DORA))
    family = of_pipeline("PixArtSigmaPipeline", export_prefixes=SD15.export_prefixes)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "diffusers", "fp32", {})
    with torch.no_grad():
        before = forward(model)
    set_language(language)
    found = verify(model, adapter, family, path, forward)
    assert words in found.reader
    assert "PixArtSigmaPipeline" in found.line("5/5")
    assert found.output_difference < 1e-4 < 0.003 < found.effect
    with torch.no_grad():
        assert torch.equal(forward(model), before)
    tensors = load_file(path)
    next(value for key, value in tensors.items() if "lora_B" in key)[0] += 0.01
    save_file(tensors, path)
    with pytest.raises(MachineError):
        verify(model, adapter, family, path, forward)


def test_nothing_is_asked_of_a_loader_that_is_not_there():
    family = of_pipeline("PixArtSigmaPipeline", export_prefixes=SD15.export_prefixes)
    assert unreadable(["unet.conv_in"], family, ["kohya"], None) == []
