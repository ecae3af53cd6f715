"""CUDA's autocast on the CPU, against CUDA's own: PyTorch knows its lists in every build, and fake "cuda" tensors obey them."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.engine.card_arithmetic import LOWER, PROMOTED, cudas_autocast, float32_operators

aten = torch.ops.aten
CASES = {
    "group_norm": lambda x: F.group_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, [8]),
    "layer_norm_affine": lambda x: F.layer_norm(x, [8], *(torch.empty(8, dtype=x.dtype, device=x.device) for _ in range(2))),
    "rms_norm": lambda x: F.rms_norm(x, [8]),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax_told": lambda x: F.softmax(x, -1, dtype=x.dtype),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(),
    "pow": lambda x: x.pow(2),
    "square": lambda x: x.square(),
    "rpow": lambda x: 2**x,
    "rsqrt": lambda x: x.rsqrt(),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "reciprocal": lambda x: x.reciprocal(),
    "softplus": F.softplus,
    "norm": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "addcmul": lambda x: torch.addcmul(x, x, x.float()),
    "mixed": lambda x: x * x.float(),
    "cat": lambda x: torch.cat([x, x.float()]),
    "mse": lambda x: F.mse_loss(x, x),
    "matmul": lambda x: x.float() @ x.float(),
    "attention": lambda x: F.scaled_dot_product_attention(x.float(), x.float(), x.float()),
    "einsum": lambda x: torch.einsum("abcd,abce->abde", x.float(), x.float()),
}


@contextmanager
def cuda_on_fakes(dtype):
    """Autocast's switches alone: `torch.autocast("cuda")` turns itself off where there is no card."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_as_on_a_card(name, dtype):
    def make(device):
        return torch.empty(2, 4, 8, 8, dtype=dtype, device=device)

    with FakeTensorMode():
        with cuda_on_fakes(dtype):
            cudas = CASES[name](make("cuda"))
        with cudas_autocast(), torch.autocast("cpu", dtype):
            ours = CASES[name](make("cpu"))
    assert (ours.dtype, ours.shape) == (cudas.dtype, cudas.shape)


def test_what_is_listed_here_is_listed_there():
    known = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert set(LOWER) | set(PROMOTED) <= known
    assert {"group_norm", "layer_norm", "softmax.int", "sum", "pow.Tensor_Scalar", "rsqrt", "exp"} <= set(float32_operators())


def test_outside_the_cpus_own_lists_hold():
    x = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        before = F.group_norm(x, 2)
        with cudas_autocast():
            assert F.group_norm(x, 2).dtype is torch.float32
        after = F.group_norm(x, 2)
    assert before.dtype is after.dtype is torch.bfloat16
    assert torch.equal(before, after)


def test_gradients_come_through():
    x = torch.randn(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with cudas_autocast(), torch.autocast("cpu", torch.bfloat16):
        (F.softmax(F.layer_norm(x, [8]), -1).pow(2)).sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert x.grad.abs().max() > 0


def test_softmax_makes_no_wide_copy_of_its_input():
    """As CUDA's kernel, which reads 16 bits and writes 32."""
    from lora_trainer.engine.tracker import MemoryTracker

    with FakeTensorMode(), cudas_autocast(), torch.autocast("cpu", torch.bfloat16), MemoryTracker() as tracker:
        x = torch.empty(1024, 1024, dtype=torch.bfloat16)
        y = F.softmax(x, -1)
    assert y.dtype is torch.float32
    assert tracker.peak == (2 + 4) * 2**20
