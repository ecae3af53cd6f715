"""Packed layers on their own: error bounds, and the same behaviour on meta, fake and real tensors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from adapter_models import sdxl_model
from helpers.counts import packed_weights
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.engine import packed as _packed
from lora_trainer.engine.four_bit import FourBit, _pack_scale, _unpack_scale
from lora_trainer.engine.packed import (
    PackedConv2d,
    PackedLinear,
    Packing,
    RowScaled,
    pack_layers,
    packing_report,
)
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.optim.optimizers import param_groups, probe
from lora_trainer.planner.encoders import encoder_groups
from lora_trainer.seam.family import BlockGroup
from lora_trainer.techniques.cast_fp8 import CastFp8
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

CPU = torch.device("cpu")
BOTH = (nn.Linear, nn.Conv2d)
PACKINGS: dict[str, Packing] = {
    "nf4": FourBit("nf4", True),
    "nf4-single": FourBit("nf4", False),
    "fp4": FourBit("fp4", True),
    "int8": RowScaled(torch.int8, BOTH),
    "fp8": RowScaled(torch.float8_e4m3fn, BOTH),
}
each_packing = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)


def linear(packing: Packing, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta", dtype=weight.dtype)
    packed = PackedLinear.of(layer, packing)
    packed.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    packed.pack_weight(weight, CPU)
    return packed


def conv(packing: Packing, weight: Tensor, **how: object) -> PackedConv2d:
    groups = how.get("groups", 1)
    layer = nn.Conv2d(weight.shape[1] * groups, len(weight), weight.shape[2:], bias=False, device="meta", **how)
    packed = PackedConv2d.of(layer, packing)
    packed.pack_weight(weight, CPU)
    return packed


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- stated error bounds

RMS = {"nf4": 0.095, "nf4-single": 0.095, "fp4": 0.126, "int8": 0.01, "fp8": 0.03}


@pytest.mark.parametrize("name", PACKINGS)
def test_normal_weights_lose_what_is_stated(name):
    weight = normal(96, 320)
    error = (linear(PACKINGS[name], weight).unpacked() - weight).norm() / weight.norm()
    assert 0.5 * RMS[name] < error < RMS[name]


@pytest.mark.parametrize(("kind", "gap"), [("nf4", 0.152), ("fp4", 0.1675)])
def test_4_bit_codes_lie_within_the_stated_share_of_the_largest(kind, gap):
    weight = normal(64, 64) * normal(64, 1, seed=1).exp()
    error = (linear(FourBit(kind, False), weight).unpacked() - weight).abs()
    assert (error <= gap * weight.abs().amax(1, keepdim=True)).all()


def test_8_bit_steps():
    weight = normal(16, 256) * normal(16, 1, seed=1).exp()
    largest = weight.abs().amax(1, keepdim=True)
    integers = linear(PACKINGS["int8"], weight).unpacked()
    assert ((integers - weight).abs() <= largest / 253).all()
    floats = linear(PACKINGS["fp8"], weight).unpacked()
    assert ((floats - weight).abs() <= (weight.abs() / 15.9).maximum(largest * 3e-6)).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_packed_in_several_goes_are_the_same(name, monkeypatch):
    weight = normal(33, 64)
    whole = linear(PACKINGS[name], weight).unpacked()
    monkeypatch.setattr(_packed, "AT_ONCE", 5 * 64)
    with MemoryTracker() as tracker:
        assert torch.equal(linear(PACKINGS[name], weight).unpacked(), whole)
    assert tracker.peak < 3 * weight.nbytes


def test_double_quantisation_moves_factors_by_less_than_2_percent_whatever_the_outliers():
    usual = normal(1000).abs() * 0.2 + 2
    for scale, bound in ((usual, 0.003), (torch.cat([usual, torch.tensor([3000.0, 0.5])]), 0.02)):
        again = _unpack_scale(list(_pack_scale(scale).values()), len(scale))
        assert ((again - scale).abs() <= bound * scale).all()
    zero = torch.zeros(3)
    assert torch.allclose(_unpack_scale(list(_pack_scale(zero).values()), 3), zero)


@each_packing
def test_rows_of_zeros_stay_zero(packing):
    weight = normal(8, 128)
    weight[2:4] = 0
    unpacked = linear(packing, weight).unpacked()
    assert unpacked.isfinite().all()
    assert not unpacked[2:4].any()


# -- computing


@each_packing
@pytest.mark.parametrize("autocast", [False, True])
def test_a_linear_computes_with_the_unpacked_weight(packing, autocast):
    packed = linear(packing, normal(32, 64), normal(32, seed=1))
    results = []
    for weight in (None, packed.unpacked(torch.bfloat16 if autocast else None).float()):
        x = normal(3, 5, 64, seed=2).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = packed(x) if weight is None else F.linear(x, weight, packed.bias)
        out.float().square().sum().backward()
        results.append((out, x.grad))
    assert results[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2, "padding": 2}], ids=str)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_convolution_computes_with_the_unpacked_weight(name, how):
    packed = conv(PACKINGS[name], normal(8, 4, 3, 3), **how)
    gradients = []
    for layer in (packed, partial(F.conv2d, weight=packed.unpacked(), **how)):
        x = normal(2, 4 * how.get("groups", 1), 9, 9, seed=1).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_memory_is_saved_without_checkpointing(name):
    """E.g. diffusers' fp8 casting keeps every unpacked weight until the backward pass."""
    peaks = {}
    for kind, packing in (("plain", None), ("packed", PACKINGS[name])):
        layers = [nn.Linear(256, 256, bias=False).bfloat16() for _ in range(8)]
        if packing:
            layers = [linear(packing, layer.weight.detach()) for layer in layers]
        model = nn.Sequential(*layers).requires_grad_(False)
        with MemoryTracker() as tracker:
            tracker.mark((*model.parameters(), *model.buffers()), "frozen")
            model(torch.zeros(2, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        peaks[kind] = tracker.peak
    one = 256 * 256 * 2
    share = {"nf4": 0.27, "int8": 0.52, "fp8": 0.52}[name]
    assert peaks["packed"] < share * 8 * one + 1.5 * one
    assert peaks["plain"] > 8 * one


def test_autograd_keeps_the_packed_tensors_alone():
    packed, kept = linear(PACKINGS["fp8"], normal(64, 64)), []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        packed(torch.zeros(2, 64, requires_grad=True))
    assert [tensor.data_ptr() for tensor in kept] == [tensor.data_ptr() for tensor in packed.packed()]


@each_packing
def test_buffers_may_become_views_of_one_flat_buffer(packing):
    """Block streaming's way; the layer looks its buffers up at each call."""
    packed = linear(packing, normal(32, 64))
    x = normal(2, 64, seed=1).requires_grad_()
    before = packed(x)
    flat, start = torch.zeros(1 << 14, dtype=torch.uint8), 0
    for name in packed.packed_names:
        old = packed._buffers[name]
        view = flat[start : start + old.nbytes].view(old.dtype).view(old.shape)
        packed._buffers[name] = view.copy_(old)
        start += -(-old.nbytes // 256) * 256
    after = packed(x)
    assert torch.equal(before, after)
    flat.zero_()
    before.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.sum().backward()


# -- meta and fake


@each_packing
def test_meta_has_the_shapes_of_the_real_tensors(packing):
    meta = PackedLinear.of(nn.Linear(96, 40, device="meta"), packing)
    real = linear(packing, normal(40, 96))
    assert meta.packed_names == real.packed_names
    for one, other in zip(meta.packed(), real.packed(), strict=True):
        assert (one.shape, one.dtype, one.is_meta, other.is_meta) == (other.shape, other.dtype, True, False)
    assert (meta.weight.shape, meta.weight.is_meta) == (real.weight.shape, True)
    assert meta(torch.empty(2, 96, device="meta")).shape == (2, 40)


def step(layer: PackedLinear, new: object) -> tuple[Tensor, MemoryTracker]:
    """Pack a weight, run forward and backward; the input's gradient."""
    with MemoryTracker() as tracker:
        layer.pack_weight(new(96, 128), CPU)
        x = new(4, 128).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x) + layer.weight.sum()
        out.float().sum().backward()
        return x.grad, tracker


@each_packing
def test_fake_tensors_take_the_same_bytes_as_real_ones(packing):
    layers = [PackedLinear.of(nn.Linear(128, 96, bias=False, device="meta"), packing) for _ in range(2)]
    real, seen = step(layers[0], torch.zeros)
    with FakeTensorMode():
        fake, foreseen = step(layers[1], torch.empty)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
    assert foreseen.peak == pytest.approx(seen.peak, rel=0.02)
    assert foreseen.now == seen.now


# -- what peft asks of a base layer


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_injecting_an_adapter_unpacks_nothing(name, monkeypatch):
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "a": linear(PACKINGS[name], normal(32, 64).bfloat16())})
    if name != "nf4":
        model["b"] = conv(PACKINGS[name], normal(8, 4, 3, 3))
    unpacked: list[object] = []
    monkeypatch.setattr(PackedLinear, "unpacked", lambda self: unpacked.append(self))
    monkeypatch.setattr(PackedConv2d, "unpacked", lambda self: unpacked.append(self))
    inject_adapter_in_model(LoraConfig(r=4, target_modules=[name for name in model if name != "norm"]), model)
    assert not unpacked
    assert type(model["a"].lora_A["default"]) is nn.Linear
    if name != "nf4":
        assert type(model["b"].lora_A["default"]) is nn.Conv2d


@pytest.mark.parametrize("name", ["nf4", "int8", "fp8"])
def test_dora_sees_the_weight(name):
    packed = nn.ModuleDict({"norm": nn.LayerNorm(4), "a": linear(PACKINGS[name], normal(32, 64))})
    plain = nn.ModuleDict({"norm": nn.LayerNorm(4), "a": nn.Linear(64, 32, bias=False)})
    plain["a"].weight.data = packed["a"].unpacked()
    outs = []
    for model in (packed, plain):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["a"], use_dora=True, init_lora_weights=False)
        inject_adapter_in_model(config, model)
        outs.append(model["a"](normal(3, 64, seed=1)))
    magnitudes = [model["a"].lora_magnitude_vector["default"].weight for model in (packed, plain)]
    assert torch.allclose(*magnitudes)
    assert torch.allclose(*outs, atol=1e-5)


def test_the_weight_answers_and_computes():
    layer = linear(PACKINGS["int8"], normal(32, 64).bfloat16())
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device) == ((32, 64), torch.bfloat16, CPU)
    assert torch.equal(layer.weight.float(), layer.unpacked().float())
    assert torch.equal(layer.weight @ torch.eye(64).bfloat16(), layer.unpacked())
    assert not list(layer.parameters())
    assert not layer.state_dict()


# -- which layers


def block() -> nn.Module:
    layers = {
        "linear": nn.Linear(64, 96),
        "odd": nn.Linear(6, 7),
        "conv": nn.Conv2d(8, 16, 3),
        "same": nn.Conv2d(8, 8, 3, padding="same"),
        "embedding": nn.Embedding(4, 64),
        "inner": nn.Sequential(nn.SiLU(), nn.Linear(96, 64)),
    }
    return nn.ModuleDict(layers).to("meta").requires_grad_(False)


@pytest.mark.parametrize(
    ("techniques", "packed"),
    [
        ([Quantize4bit()], {"linear": "FourBit", "inner.1": "FourBit"}),
        ([Quantize8bit(convolutions=False)], {"linear": "RowScaled", "odd": "RowScaled", "inner.1": "RowScaled"}),
        (
            [Quantize4bit(), CastFp8()],
            {"linear": "FourBit", "inner.1": "FourBit", "odd": "RowScaled", "conv": "RowScaled"},
        ),
    ],
    ids=["4bit", "8bit linears", "4bit, then fp8"],
)
def test_layers_that_do_not_fit_stay_and_are_counted(techniques, packed):
    one, other = block(), block()
    groups = [BlockGroup("blocks", [one])]
    paths = [name for name, _ in one.named_modules()]
    for technique in techniques:
        technique.convert(nn.ModuleDict({"packed": one, "head": other}), groups)
    found = {name: type(m.packing).__name__ for name, m in one.named_modules() if hasattr(m, "packing")}
    assert found == packed
    assert packing_report(groups) == (len(packed), 5 - len(packed))
    in_4_bits = packed_weights(one).get("nf4", 0)
    assert in_4_bits == (2 * 64 * 96 if isinstance(techniques[0], Quantize4bit) else 0)
    assert [name for name, _ in one.named_modules()] == paths
    assert not any(hasattr(module, "packing") for module in other.modules())


def test_a_home_given_before_stays():
    layer = nn.Linear(64, 64, device="meta")
    layer.home = torch.device("cpu", 0)
    model = nn.ModuleDict({"a": layer})
    pack_layers([BlockGroup("blocks", [model])], PACKINGS["nf4"])
    assert model["a"].home == torch.device("cpu", 0)


def test_a_linear_takes_the_weight_of_a_1x1_convolution():
    """So attention layers are stored in some files."""
    weight = normal(32, 64)
    layer = linear(PACKINGS["nf4"], weight)
    before = layer.unpacked()
    layer.pack_weight(weight[:, :, None, None], CPU)
    assert torch.equal(layer.unpacked(), before)


# -- text encoders


@pytest.mark.parametrize(
    ("technique", "bound"), [(Quantize4bit(), 0.3), (Quantize8bit(), 0.03), (CastFp8(), 0.1)], ids=str
)
def test_text_encoders(technique, bound):
    encoders = (
        nn.ModuleDict({name: m for name, m in sdxl_model().items() if name != "unet"}).eval().requires_grad_(False)
    )
    with torch.device("meta"):
        packed = nn.ModuleDict({name: type(encoder)(encoder.config) for name, encoder in encoders.items()})
    technique.convert(packed.eval().requires_grad_(False), encoder_groups(packed))
    assert [group.name for group in encoder_groups(packed)] == ["text_encoder", "text_encoder_2"]
    assert packing_report(encoder_groups(packed)) == (24, 0)  # 2 encoders, 2 layers, q, k, v, out, fc1, fc2
    fill(packed, encoders)
    ids = torch.tensor([[0, 5, 9, 30, 1, 1, 1, 1]])
    for name, encoder in encoders.items():
        one, other = encoder(ids)[0], packed[name](ids)[0]
        assert 1e-4 < (one - other).norm() / one.norm() < bound


def fill(packed: nn.Module, source: nn.Module) -> None:
    for path, layer in packed.named_modules():
        origin = source.get_submodule(path)
        if hasattr(layer, "pack_weight"):
            layer.pack_weight(origin.weight, CPU)
        for name in layer._parameters:
            layer._parameters[name] = origin._parameters[name]
        for name in layer._buffers:
            if layer._buffers[name] is not None and layer._buffers[name].is_meta:
                layer._buffers[name] = origin._buffers[name]


# -- 8-bit optimizers


@pytest.mark.parametrize("use_8bit", [False, True])
def test_the_paged_optimizer_comes_from_the_config(use_8bit):
    settings = TrainingConfig(optimizer="pagedadamw8bit", use_8bit_optimizer="yes" if use_8bit else "no")
    probe(settings, CPU)
    groups = param_groups({"unet.a.lora_A.weight": nn.Parameter(torch.zeros(64, 128))}, settings)
    assert type(Optimizer8bit().build(groups, settings)).__name__ == "PagedAdamW8bit"


@pytest.mark.parametrize("paged", [False, True])
def test_the_8_bit_optimizer_runs_on_fake_tensors(paged):
    settings = TrainingConfig()
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as tracker:
        weight = nn.Parameter(torch.empty(128, 1024))
        optimizer = Optimizer8bit(paged).build(param_groups({"unet.a.lora_A.weight": weight}, settings), settings)
        weight.grad = torch.empty_like(weight)
        before = tracker.now
        optimizer.step()
    assert type(optimizer).__name__ == "AdamW8bit"
    assert weight.numel() * 2 <= tracker.now - before <= weight.numel() * 2.1
