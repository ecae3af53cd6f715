"""LoHa and LoKr layers against the weight change they stand for, as LyCORIS defines it: outputs, gradients, start, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lora_trainer.adapters import layers
from lora_trainer.adapters.layers import AdaptedLayer, LohaLayer, LokrLayer, split
from lora_trainer.layouts.lycoris import LycorisModule

BASES = {
    "linear": lambda: nn.Linear(48, 36),
    "strided": lambda: nn.Conv2d(12, 20, 3, stride=2, padding=1),
    "pointwise": lambda: nn.Conv2d(12, 20, 1, bias=False),
}
KINDS = {
    "loha": lambda base: LohaLayer(base, 3, 0.5),
    "lokr": lambda base: LokrLayer(base, 2, 0.5, factor=4),
    "lokr, near the root": lambda base: LokrLayer(base, 1, 0.25),
    "lokr, whole": lambda base: LokrLayer(base, 100, 0.5, factor=4),
}


def made(base: str, kind: str) -> AdaptedLayer:
    torch.manual_seed(3)
    layer: AdaptedLayer = KINDS[kind](BASES[base]().requires_grad_(False))
    with torch.no_grad():
        for factor in layer.factors().values():
            factor.normal_(std=0.5)
    return layer


def example(base: str) -> torch.Tensor:
    return torch.randn(2, 7, 48) if base == "linear" else torch.randn(2, 12, 9, 9)


def dense(layer: AdaptedLayer, x: torch.Tensor) -> torch.Tensor:
    """The base with the change in its weight, by the definitions alone."""
    f = layer.factors()
    if isinstance(layer, LohaLayer):
        change = (f["hada_w1_a"] @ f["hada_w1_b"]) * (f["hada_w2_a"] @ f["hada_w2_b"])
    else:
        second = f["lokr_w2"] if "lokr_w2" in f else f["lokr_w2_a"] @ f["lokr_w2_b"]
        change = torch.kron(f["lokr_w1"], second.flatten(1))
    weight = layer.weight + layer.scale * change.view(layer.weight.shape)
    base = layer.base_layer
    if isinstance(base, nn.Conv2d):
        return F.conv2d(x, weight, base.bias, base.stride, base.padding)
    return F.linear(x, weight, base.bias)


@pytest.mark.parametrize("rows", [10_000, 5], ids=["at once", "some rows at a time"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_output_and_gradients_are_those_of_the_changed_weight(base, kind, rows, monkeypatch):
    layer, x = made(base, kind), example(base).requires_grad_()
    monkeypatch.setattr(layers, "AT_ONCE", rows * layer.weight[0].numel())
    wanted = [x, *layer.factors().values()]
    slope = torch.randn_like(layer(x))
    ours = torch.autograd.grad((layer(x) * slope).sum(), wanted)
    theirs = torch.autograd.grad((dense(layer, x) * slope).sum(), wanted)
    assert torch.allclose(layer(x), dense(layer, x), atol=1e-5)
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_the_change_read_from_a_file_is_the_layers(base, kind):
    layer, x = made(base, kind), example(base)
    module = LycorisModule({name: f.detach() for name, f in layer.factors().items()}, layer.scale, layer.rank)
    weight, how = module.delta().view(layer.weight.shape), {}
    if base != "linear":
        how = {"stride": layer.base_layer.stride, "padding": layer.base_layer.padding}
    added = (F.linear if base == "linear" else F.conv2d)(x, weight, **how)
    assert torch.allclose(layer.base_layer(x) + added, layer(x), atol=1e-5)
    for same in (module.balanced(), module.with_scale(1.0), module.with_scale(3.0).balanced()):
        assert torch.allclose(same.delta(), module.delta(), rtol=1e-5, atol=1e-7)


def test_balanced_factors_are_of_one_size_and_not_rounded():
    module = LycorisModule({"hada_w1_a": torch.full((2, 1), 1e-6), "hada_w1_b": torch.full((1, 2), 3e4),
                            "hada_w2_a": torch.full((2, 1), 1.5e-5), "hada_w2_b": torch.full((1, 2), 5.0)}, 1.0, 1)  # fmt: skip
    sizes = [float(factor.max()) for factor in module.balanced().factors.values()]
    assert max(sizes) / min(sizes) < 10
    assert torch.equal(module.balanced().delta(), module.delta())


@pytest.mark.parametrize(("base", "kind"), [("linear", "loha"), ("linear", "lokr, whole"), ("strided", "lokr")])
def test_what_is_kept_for_the_backward_pass_is_far_less_than_a_weight(base, kind):
    layer, x = made(base, kind), example(base)[:1, :1] if base == "linear" else example(base)[:1]
    kept: list[int] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        layer(x)
    assert max(kept) < layer.weight.numel()


def test_autocast_casts_and_gives_float32_gradients():
    for kind in KINDS:
        layer, x = made("linear", kind), example("linear")
        layer.base_layer.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x.to(torch.bfloat16))
        assert output.dtype == torch.bfloat16
        assert (output.float() - dense(layer.float(), x)).abs().max() < 0.03 * output.abs().max()
        output.float().sum().backward()
        assert all(f.grad.dtype == torch.float32 and bool(f.grad.any()) for f in layer.factors().values())


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_it_is_the_base(kind):
    layer, x = made("linear", kind), example("linear")
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [(3072, None, (48, 64)), (3072, 8, (8, 384)), (250, 4, (2, 125)), (127, None, (1, 127)), (8, 16, (2, 4)), (320, 16, (16, 20))],
)
def test_split(size, factor, expected):
    """The values of LyCORIS's `factorization`."""
    assert split(size, factor) == expected
