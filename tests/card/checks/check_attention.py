"""Fused attention: chosen as torch chooses on such a card, with the CPU's numbers and a card's allocations."""

import emucuda
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.usefixtures("empty_card")
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
ROUNDING = 512


@pytest.fixture
def card():
    yield lambda capability: emucuda.set_card(capability=capability)
    emucuda.set_card(capability=7.5)


def inputs(shape, dtype, *, keys=None, heads=None, device="cuda", grad=True):
    """(B, H, L, D) queries, keys and values as models make them: heads split off a projection."""
    generator, (batch, count, length, dim) = torch.Generator().manual_seed(0), shape
    sizes = [(count, length), (heads or count, keys or length), (heads or count, keys or length)]
    drawn = [
        torch.randn(batch, rows, h, dim, generator=generator).to(device, dtype).transpose(1, 2) for h, rows in sizes
    ]
    return [x.detach().requires_grad_(grad) for x in drawn]


def chosen(action):
    before = emucuda.counts()
    action()
    after = emucuda.counts()
    (name,) = [key for key in after if key.startswith("attention.") and after[key] > before.get(key, 0)]
    return name.partition(".")[2]


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "options", "kind"),
    [
        (8.0, HALF, 64, {}, "flash"),
        (8.0, BF16, 256, {}, "flash"),
        (8.0, FLOAT, 64, {}, "efficient"),
        (8.0, HALF, 64, {"mask": True}, "efficient"),
        (8.0, HALF, 512, {}, "efficient"),
        (8.9, HALF, 256, {}, "flash"),
        (8.9, HALF, 208, {}, "efficient"),
        (7.5, HALF, 64, {}, "efficient"),
        (7.5, FLOAT, 60, {}, "efficient"),
        (7.5, BF16, 64, {}, "math"),
        (7.5, HALF, 60, {}, "math"),
        (8.0, HALF, 64, {"is_causal": True}, "flash"),
        (8.0, HALF, 64, {"is_causal": True, "keys": 24}, "efficient"),
        (8.0, HALF, 64, {"heads": 2, "enable_gqa": True}, "flash"),
        (7.5, HALF, 64, {"heads": 2, "enable_gqa": True}, "math"),
        (8.0, HALF, 64, {"dropout_p": 0.5}, "math"),
    ],
)
def test_kernels_are_chosen_as_on_that_card(card, capability, dtype, dim, options, kind):
    card(capability)
    options = dict(options)
    q, k, v = inputs((1, 4, 16, dim), dtype, keys=options.pop("keys", None), heads=options.pop("heads", None))
    if options.pop("mask", False):
        options["attn_mask"] = torch.zeros(16, 16, dtype=dtype, device="cuda")
    assert chosen(lambda: F.scaled_dot_product_attention(q, k, v, **options)) == kind


def test_torchs_questions_have_the_same_answer(card):
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

    q, k, v = inputs((1, 4, 16, 64), HALF)
    params = SDPAParams(q, k, v, None, 0.0, False, False)
    answers = {}
    for capability in (7.5, 8.0):
        card(capability)
        answers[capability] = can_use_flash_attention(params), can_use_efficient_attention(params)
    assert answers == {7.5: (False, True), 8.0: (True, True)}


@pytest.mark.parametrize("capability", [7.5, 8.0])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"mask": True}, {"heads": 2, "enable_gqa": True}], ids=str
)
def test_numbers_and_gradients_are_the_cpus(card, capability, options):
    card(capability)
    found = []
    for device in ("cpu", "cuda"):
        given = dict(options)
        q, k, v = inputs(
            (2, 4, 40, 64), FLOAT if capability < 8 else BF16, heads=given.pop("heads", None), device=device
        )
        if given.pop("mask", False):
            given["attn_mask"] = (torch.arange(40, device=device) < 30).expand(2, 1, 40, 40)
        out = F.scaled_dot_product_attention(q, k, v, **given)
        out.float().square().sum().backward()
        found.append([x.detach().float().cpu() for x in (out, q.grad, k.grad, v.grad)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5 if capability < 8 else 3e-2, rtol=1e-2)


# -- memory


def rounded(*counts):
    return sum(-(-count // ROUNDING) * ROUNDING for count in counts)


def forward_and_backward(q, k, v, mask=None):
    """Bytes kept by the forward pass, its peak; the most that the backward pass holds beyond what was there before it."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    kept, peak = torch.cuda.memory_allocated() - start, torch.cuda.max_memory_allocated() - start
    seed = torch.ones_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(out, seed)
    return kept, peak, torch.cuda.max_memory_allocated() - before


def test_flash_keeps_no_scores_and_sums_dq_in_float32(card):
    card(8.0)
    q, k, v = inputs((1, 2, 1000, 40), BF16)
    kept, peak, backward = forward_and_backward(q, k, v)
    assert kept == peak == rounded(q.nbytes, 2 * 1000 * 4, 16, 8)  # output, log-sum-exp, two numbers of the generator
    dq_sum, delta = 1024 * 2 * 64 * 4, 2 * 1024 * 4  # lengths in 128s, dimensions in 32s
    assert backward == rounded(q.nbytes, k.nbytes, v.nbytes, dq_sum, delta)


def test_efficient_on_turing_sums_dq(card):
    card(7.5)
    q, k, v = inputs((1, 2, 1024, 128), HALF)
    kept, peak, backward = forward_and_backward(q, k, v)
    assert kept == peak == rounded(q.nbytes, 2 * 1024 * 4)
    workspace = 2 * 8 * 2 * (128 * 64 + 4) * 4
    assert backward == rounded(q.nbytes, k.nbytes, v.nbytes, workspace, 2 * 1024 * 4)
    assert workspace == pytest.approx(q.numel() * 4, rel=0.01)


def test_efficient_on_ampere_sums_three(card):
    """A mask keeps flash away; a card of 99 KiB of shared memory has no registers for dk and dv of 128 dimensions."""
    card(8.6)
    q, k, v = inputs((1, 2, 1024, 128), HALF)
    _, _, backward = forward_and_backward(q, k, v, torch.zeros(1, 1, 1024, 1024, dtype=HALF, device="cuda"))
    dq, dk_and_dv = 16 * 2 * (64 * 64 + 4), 2 * 16 * 64 * 128
    workspace = 2 * (dq + dk_and_dv) * 4
    assert backward == rounded(q.nbytes, k.nbytes, v.nbytes, workspace, 2 * 1024 * 4)
    assert workspace == pytest.approx(3 * q.numel() * 4, rel=0.01)


def test_efficient_heads_over_128_gather_their_output(card):
    card(7.5)
    q, k, v = inputs((1, 2, 64, 160), HALF, grad=False)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(q, k, v)
    assert torch.cuda.memory_allocated() - start == rounded(out.nbytes)
    assert torch.cuda.max_memory_allocated() - start == rounded(out.nbytes, out.numel() * 4)


@pytest.mark.parametrize(("capability", "mib"), [(75, 54), (80, 54), (86, 66)])
def test_workspace_of_flux_at_1024(capability, mib):
    """24 heads of 128, 4,608 tokens: dq whole; of dk and dv eight blocks of 64 keys, where registers are too few."""
    found = torch.ops.emu.efficient_workspace([1, 24, 4608, 4608, 128], True, capability)
    assert found / 2**20 == pytest.approx(mib, abs=0.2)
