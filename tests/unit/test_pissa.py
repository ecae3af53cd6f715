"""PiSSA: the principal components it starts from, and files of rank 2r for the base as it was."""

import pytest
import torch
from adapter_models import MODELS, SD15, forward, perturb, pipeline, sd15_model, trained
from safetensors.torch import load_file
from torch import nn

from lora_trainer.adapters import inject
from lora_trainer.adapters.pissa import components
from lora_trainer.config.schema import ModelConfig
from lora_trainer.diffusion.unet import block_groups
from lora_trainer.errors import SourceError
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.techniques.quantize_4bit import TECHNIQUE as FourBit

SETTINGS = {"lora_init": "pissa", "lora_rank": 4, "lora_alpha": 2, "lora_targets": "all", "train_text_encoder": True}
Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


def fresh(model=None, seed=0, **changes):
    model = model or sd15_model()
    return model, inject(model, SD15, ModelConfig(**{**SETTINGS, **changes}), seed)


@pytest.mark.parametrize(("shape", "rank"), [((200, 300), 8), ((300, 40), 8), ((12, 500), 8), ((6, 5), 8)])
def test_the_best_of_its_rank(shape, rank):
    """Within 1 % of the exact SVD's error, for a spectrum that falls as a trained weight's does."""
    generator = torch.Generator().manual_seed(0)
    full = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], full, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(shape[1], full, generator=generator))[0]
    sizes = 1 / (1 + torch.arange(full)) ** 0.7
    weight = left @ sizes.diag() @ right.T
    a, b = components(weight, rank, generator, torch.device("cpu"))
    assert (tuple(a.shape), tuple(b.shape)) == ((rank, shape[1]), (shape[0], rank))
    best = float(sizes[rank:].norm())
    assert float((weight - b @ a).norm()) <= 1.01 * best + 1e-5
    assert torch.allclose(a.norm(dim=1), b.norm(dim=0), atol=1e-4)


def test_it_starts_from_the_weight_and_changes_nothing():
    model, adapter = fresh()
    with torch.no_grad():
        assert torch.equal(forward(model), forward(sd15_model()))
    assert adapter.is_untrained()
    assert not adapter.export()[Q].delta().any()
    layer, scale = adapter.layers[Q], adapter.scalings()[Q]
    weight = layer.base_layer.weight
    held = scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert (weight - held).norm() < 1.02 * torch.linalg.svdvals(weight)[4:].norm()
    conv = adapter.layers["unet.mid_block.resnets.0.conv1"]
    flat = conv.base_layer.weight.flatten(1)
    held = scale * conv.lora_B["default"].weight.flatten(1) @ conv.lora_A["default"].weight.flatten(1)
    assert (flat - held).norm() < 1.02 * torch.linalg.svdvals(flat)[4:].norm()


def test_the_start_is_the_seeds_and_the_weights():
    one, other = fresh(seed=3)[1].state_dict(), fresh(seed=3)[1].state_dict()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert f"{Q}.start_A" in one
    assert torch.equal(one[f"{Q}.lora_A.weight"], one[f"{Q}.start_A"])


def test_the_change_is_what_the_matrices_have_become_less_what_they_were():
    _, adapter = fresh()
    perturb(adapter)
    state, lora = adapter.state_dict(), adapter.export()
    for path, module in lora.items():
        now, then = ((state[f"{path}.{b}"].flatten(1) @ state[f"{path}.{a}"].flatten(1)) for a, b in
                     (("lora_A.weight", "lora_B.weight"), ("start_A", "start_B")))  # fmt: skip
        assert module.rank == 8
        assert torch.allclose(module.delta(), adapter.scalings()[path] * (now - then), atol=1e-5)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_twice_the_rank_works_on_the_base_as_it_was(name, layout, tmp_path):
    model, adapter, family = trained(name, **SETTINGS)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp32", {})
    found = verify(model, adapter, family, path, forward)
    assert found.output_difference < 1e-4
    assert found.effect > 1e-3
    with torch.no_grad():
        ours, untouched = forward(model), MODELS[name][0]()
        pipeline(name, untouched).load_lora_weights(str(path))
        assert (forward(untouched) - ours).abs().max() < 1e-4 * ours.abs().max()
    assert {x.shape[0] for key, x in load_file(path).items() if key.endswith(("lora_down.weight", "lora_A.weight"))} == {8}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_small_changes_survive_16_bits(precision, tmp_path):
    """The difference of two products would drown: each is rounded by more than what they differ."""
    model, adapter, family = trained("sd15", lora_init="pissa", lora_rank=4)
    with torch.no_grad():
        for key, tensor in adapter.named_parameters().items():
            start = adapter.named_tensors()[key.replace("lora_A.weight", "start_A").replace("lora_B.weight", "start_B")]
            tensor.copy_(start.float() + 1e-5 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", precision, {})
    assert verify(model, adapter, family, path, forward).delta_difference < (1e-3 if precision == "fp16" else 1e-2)


def test_a_state_brings_its_start_along():
    """Components found on another machine may differ in sign: what B A is measured from is part of the state."""
    model, adapter = fresh(seed=1)
    perturb(adapter)
    with torch.no_grad():
        expected = forward(model)
    other_model, other = fresh(seed=2)
    state = {key: -value if "start" in key or "lora" in key else value for key, value in adapter.state_dict().items()}
    other.load_state_dict(state)
    with torch.no_grad():
        assert torch.allclose(forward(other_model), expected, atol=1e-5)  # (-B)(-A) is B A
    with pytest.raises(SourceError, match="outro LoRA"):
        inject(sd15_model(), SD15, ModelConfig(**{**SETTINGS, "lora_init": "default"}), 0).load_state_dict(state)


def test_a_packed_base_is_unpacked_one_weight_at_a_time():
    real, model = sd15_model(), nn.ModuleDict({"unet": sd15_model()["unet"].to("meta")})
    FourBit().convert(model, block_groups(model))
    for name, layer in model.named_modules():
        source = real.get_submodule(name)
        for key, value in list(source._parameters.items()):
            if value is not None and hasattr(layer, "pack_weight") and key == "weight":
                layer.pack_weight(value.detach(), torch.device("cpu"))
            elif value is not None:
                layer._parameters[key] = nn.Parameter(value.detach(), requires_grad=False)
    adapter = inject(model, SD15, ModelConfig(lora_init="pissa", lora_rank=4), 0)
    layer = adapter.layers[Q]
    assert hasattr(layer.base_layer, "unpacked")
    weight = layer.base_layer.unpacked().float()
    held = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert (weight - held).norm() < 1.02 * torch.linalg.svdvals(weight)[4:].norm()


def test_on_meta_only_places_are_made():
    with torch.device("meta"):
        model = sd15_model()
    _, adapter = fresh(nn.ModuleDict({"unet": model["unet"]}), train_text_encoder=False)
    assert all(tensor.is_meta for tensor in adapter.named_tensors().values())
    assert {t.dtype for key, t in adapter.named_tensors().items() if "start" in key} == {torch.bfloat16}
