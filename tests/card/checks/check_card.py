"""The card itself: tensors, autograd, streams, page-locked copies, and the faults it reports."""

import emucuda
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

CARD = torch.device("cuda", 0)


def reported(kind, action, text=""):
    """The action raises, now or at the next operator, because of this kind of fault."""
    with pytest.raises(RuntimeError, match=f"emucuda: {kind}: .*{text}"):
        action()
    emucuda.clear()


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


# -- tensors


def test_device():
    x = torch.randn(4, 8, device="cuda")
    assert x.is_cuda
    assert x.device == CARD
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator().type == "cuda"


def test_product_is_the_cpus():
    x = torch.randn(4, 8, device="cuda")
    y = torch.ones(8, 8)
    assert torch.allclose((x @ y.to("cuda") + 1).cpu(), x.cpu() @ y + 1)


def test_view_shares_memory():
    x = torch.ones(4, 8, device="cuda")
    x[0].zero_()
    assert x.sum().item() == 24


def test_two_devices_in_one_operator():
    with pytest.raises(RuntimeError, match="same device"):
        torch.randn(4, 8, device="cuda") + torch.ones(4, 8)


def test_no_numpy_of_the_card():
    with pytest.raises(TypeError, match="device type tensor"):
        torch.randn(4, device="cuda").numpy()


def test_fresh_memory_is_nan():
    assert torch.isnan(torch.empty(100, device="cuda")).all().item()


def test_data_is_exchanged():
    m = torch.randn(6, 6, device="cuda")
    m.data = torch.zeros(2, 2, device="cuda")
    assert m.shape == (2, 2)
    c = torch.randn(3)
    c.data = torch.ones(3, device="cuda")
    assert c.is_cuda


def test_indexing_by_truth():
    x = torch.arange(-2.0, 3.0, device="cuda")
    assert x[x > 0].tolist() == [1.0, 2.0]


def test_save_and_load(tmp_path):
    x = torch.randn(4, 8, device="cuda")
    torch.save({"a": x}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", map_location="cpu")["a"], x.cpu())


def test_generators():
    draws = [torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(3)) for _ in range(2)]
    assert torch.equal(*draws)
    torch.manual_seed(5)
    first = torch.randn(3, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(first, torch.randn(3, device="cuda"))


# -- autograd


def test_gradients_are_the_cpus():
    net, x = small_net(), torch.randn(2, 3, 4, 4)
    on_card = small_net().cuda()
    on_card.load_state_dict(net.state_dict())
    net(x).square().mean().backward()
    on_card(x.cuda()).square().mean().backward()
    for one, other in zip(on_card.parameters(), net.parameters(), strict=True):
        assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-6)


def test_autocast_takes_cudas_lists():
    with torch.autocast("cuda", torch.float16):
        assert small_net().cuda()(torch.randn(2, 3, 4, 4, device="cuda")).dtype is torch.float16
        assert torch.randn(4, device="cuda", dtype=torch.float16).exp().dtype is torch.float32


def test_grad_scaler():
    net = small_net().cuda()
    optimizer, scaler = torch.optim.AdamW(net.parameters(), 1e-3), torch.amp.GradScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = net(torch.randn(2, 3, 4, 4, device="cuda")).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 0


def test_checkpointing_draws_the_same_numbers():
    layer, drop, x = nn.Linear(8, 8).cuda(), nn.Dropout(0.5), torch.randn(4, 8, device="cuda", requires_grad=True)
    gradients = []
    for run in (lambda f: f(x), lambda f: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(1)
        run(lambda t: drop(layer(t))).sum().backward()
        gradients.append(x.grad.cpu())
        x.grad = None
    assert torch.equal(*gradients)


def test_fake_tensors_say_cuda():
    with FakeTensorMode():
        x = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        assert x.grad.shape == x.shape


# -- order


def test_a_race_is_reported_both_ways():
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")

    def change():
        with torch.cuda.stream(side):
            x.add_(1)

    reported("race", change, "nothing orders")
    side.wait_stream(torch.cuda.current_stream())
    change()
    reported("race", lambda: x.sum(), "nothing orders")
    torch.cuda.current_stream().wait_event(side.record_event())
    assert x[0].item() == 2  # the first change did not happen


def use_and_drop(*, record):
    side, x = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if record:
        x.record_stream(side)
    del x
    torch.ones(1, device="cuda") + 1


def test_freed_in_use():
    reported("freed-in-use", lambda: use_and_drop(record=False), "record_stream")


def test_record_stream_is_enough():
    use_and_drop(record=True)


def test_a_copy_to_the_host_shows_after_the_wait():
    host, x = torch.empty(1000, pin_memory=True), torch.arange(1000.0, device="cuda")
    assert host.is_pinned()
    assert not torch.empty(3).is_pinned()
    host.copy_(x, non_blocking=True)
    assert torch.isnan(host).all()
    torch.cuda.current_stream().synchronize()
    assert host[999].item() == 999


def test_a_source_changed_in_flight():
    host, x = torch.zeros(1000, pin_memory=True), torch.zeros(1000, device="cuda")

    def change():
        x.copy_(host, non_blocking=True)
        host.fill_(2.0)
        torch.cuda.synchronize()
        x + 1

    reported("host-source-changed", change)


def test_host_writes_where_a_copy_lands():
    host, x = torch.zeros(1000, pin_memory=True), torch.zeros(1000, device="cuda")

    def change():
        host.copy_(x, non_blocking=True)
        host.fill_(2.0)
        torch.cuda.synchronize()
        x + 1

    reported("host-wrote-in-flight", change)


def test_two_streams_over_the_same_host_bytes():
    host, side = torch.zeros(1000, pin_memory=True), torch.cuda.Stream()
    one, other = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())

    def race():
        host.copy_(one, non_blocking=True)
        with torch.cuda.stream(side):
            host.copy_(other, non_blocking=True)

    reported("host-race", race)
    one.record_stream(side), other.record_stream(side)


def test_unlocked_in_flight():
    runtime, host, x = torch.cuda.cudart(), torch.zeros(4096), torch.zeros(4096, device="cuda")
    assert runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0

    def unlock():
        host.copy_(x, non_blocking=True)
        runtime.cudaHostUnregister(host.data_ptr())
        x + 1

    reported("unlocked-in-flight", unlock)


def test_page_locking_refused(monkeypatch):
    monkeypatch.setenv("EMU_NO_LOCK", "1")
    host = torch.zeros(4096)
    assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) != 0
    assert not host.is_pinned()


# -- a card that cannot


def test_no_kernels_for_this_card():
    x = torch.zeros(1, device="cuda")
    emucuda.no_kernels(True)
    try:
        with pytest.raises(RuntimeError, match="no kernel image"):
            x + 1
    finally:
        emucuda.no_kernels(False)


def test_the_nth_allocation_fails_once():
    emucuda.oom_after(2)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        torch.empty(5, device="cuda") * 2 + torch.ones(5, device="cuda")
    torch.ones(5, device="cuda")


def test_nvml_tells_of_the_card(monkeypatch):
    pynvml = pytest.importorskip("pynvml")
    emucuda.set_card(others=1 << 30)
    x = torch.ones(1 << 20, device="cuda")
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    assert memory.total == torch.cuda.mem_get_info()[1] == memory.free + memory.used
    assert memory.used > (1 << 30) + torch.cuda.memory_reserved() >= x.nbytes
    other, own = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    assert other.usedGpuMemory == memory.used - own.usedGpuMemory == 1 << 30
    assert pynvml.nvmlSystemGetDriverVersion() == "570.00"
    emucuda.set_card(others=0)
    monkeypatch.setenv("EMU_NO_NVML", "1")
    with pytest.raises(pynvml.NVMLError):
        pynvml.nvmlInit()


def test_rms_norm_is_fused():
    """It keeps its input and 1/rms; the CPU's is made of parts, which keep more."""
    found = []
    for device in ("cpu", "cuda"):
        norm, generator = nn.RMSNorm(64).to(device), torch.Generator().manual_seed(0)
        x = torch.randn(4, 16, 64, generator=generator).to(device).requires_grad_()
        before = torch.cuda.memory_allocated()
        y = norm(x)
        kept = torch.cuda.memory_allocated() - before
        y.square().sum().backward()
        found.append([t.detach().cpu() for t in (y, x.grad, norm.weight.grad)])
    assert kept == y.nbytes + 512
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_the_profiler_runs():
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(4, device="cuda") + 1
    assert "aten::add" in profile.key_averages().table(sort_by="self_device_time_total")


@pytest.mark.parametrize("inference", [False, True])
def test_complex_views(inference):
    """As rotary embeddings take them: a view of the same memory, and autograd follows."""
    x = torch.arange(8.0, device="cuda").requires_grad_(not inference)
    with torch.inference_mode(inference):
        y = (x * 1).view(4, 2)
        turned = torch.view_as_real(torch.view_as_complex(y) * 1j).flatten()
    assert turned.tolist() == [-1.0, 0.0, -3.0, 2.0, -5.0, 4.0, -7.0, 6.0]
    if not inference:
        (turned * torch.arange(8.0, device="cuda")).sum().backward()
        assert x.grad.tolist() == [1.0, 0.0, 3.0, -2.0, 5.0, -4.0, 7.0, -6.0]
