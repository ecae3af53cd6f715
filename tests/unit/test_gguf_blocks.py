"""ggml's blocks: the weights of the `gguf` package, bit for bit, and the same operations on fake and meta tensors."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference
from gguf.quants import quantize
from helpers.gguf_files import random_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.files import gguf_blocks as blocks
from lora_trainer.files.gguf_blocks import LAYOUTS, PLAIN, SUPPORTED, dequantize, row_bytes

each_kind = pytest.mark.parametrize("kind", sorted(LAYOUTS))
ROWS, COLUMNS = 6, 512


def expected(raw: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(reference(raw, GGMLQuantizationType[kind]))


@each_kind
def test_layouts_are_those_of_ggml(kind):
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (LAYOUTS[kind].weights, LAYOUTS[kind].nbytes)


@each_kind
def test_every_bit_pattern_comes_out_as_in_the_gguf_package(kind):
    """All bytes random, infinite and undefined factors included."""
    raw = np.random.default_rng(1).integers(0, 256, (ROWS, row_bytes(kind, COLUMNS)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = expected(raw, kind)
    found = dequantize(torch.from_numpy(raw), kind, torch.float32)
    same = found.view(torch.int32) == want.view(torch.int32)
    assert bool((same | (found.isnan() & want.isnan())).all())
    assert bool(want.isfinite().sum() > want.numel() // 2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_quantised_normal_weights(kind):
    weight = np.random.default_rng(2).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    raw = quantize(weight, GGMLQuantizationType[kind])
    found = dequantize(torch.from_numpy(raw.view(np.uint8).reshape(ROWS, -1)), kind, torch.float32)
    assert torch.equal(found, expected(raw, kind))
    error = float((found - torch.from_numpy(weight)).norm()) / float(np.linalg.norm(weight))
    assert error < 2.0 ** (1 - int(kind[1] if kind[0] == "Q" else 8))


@each_kind
def test_other_dtypes_are_the_float32_weights_rounded(kind):
    raw = torch.from_numpy(random_blocks(kind, (ROWS, COLUMNS)))
    exact = dequantize(raw, kind, torch.float32)
    assert 0.02 < float(exact.std()) < 0.1
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(raw, kind, dtype), exact.to(dtype))


@each_kind
def test_part_by_part_is_the_same(kind, monkeypatch):
    raw = torch.from_numpy(random_blocks(kind, (ROWS, COLUMNS)))
    whole = dequantize(raw, kind, torch.bfloat16)
    monkeypatch.setitem(blocks.AT_ONCE, "cpu", 5 * LAYOUTS[kind].weights)
    assert torch.equal(dequantize(raw, kind, torch.bfloat16), whole)


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
def test_fake_and_meta_tensors_have_the_real_ones_shape(kind, monkeypatch):
    monkeypatch.setitem(blocks.AT_ONCE, "cpu", 2 * 512)
    size = (ROWS, row_bytes(kind, COLUMNS))
    with FakeTensorMode():
        fake = dequantize(torch.empty(size, dtype=torch.uint8), kind, torch.bfloat16)
    meta = dequantize(torch.empty(size, dtype=torch.uint8, device="meta"), kind, torch.bfloat16)
    assert fake.shape == meta.shape == (ROWS, COLUMNS)
    assert fake.dtype == meta.dtype == torch.bfloat16


def test_plain_kinds():
    assert PLAIN.keys() <= SUPPORTED
    assert row_bytes("F16", 3) == 6
