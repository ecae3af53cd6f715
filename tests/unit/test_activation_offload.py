"""Offloaded activations come back as they were; host buffers serve again; weights and small things stay."""

import torch
from streaming_models import Chain, apply

from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.techniques.activation_offload import ActivationOffload
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing

CHECKPOINTING = GradientCheckpointing()


def offload(min_bytes: int = 1) -> ActivationOffload:
    return ActivationOffload(min_bytes=min_bytes)


def test_host_buffers_serve_again_in_the_next_step():
    technique, model, x = offload(), apply(Chain(4), CHECKPOINTING), torch.randn(64, 16)
    technique.wrap(model, model.groups)
    with MemoryTracker() as tracker:
        for _ in range(2):
            with technique.context():
                loss = model(x).sum()
            after = tracker.host_now
            loss.backward()
            del loss
    free = technique._pool.free
    assert sum(buffer.nbytes for buffer in free) <= after
    assert tracker.host_peak <= 5 * 64 * 16 * 4 + 10 * 5632  # block inputs, and random states of one step
    technique.release()
    assert not technique._pool.free


def test_what_several_blocks_keep_is_copied_once():
    technique, shared = offload(), torch.randn(64, 16)
    weight = torch.randn(16, 16, requires_grad=True)
    with technique.context(), MemoryTracker() as tracker:
        loss = sum((shared @ weight).sum() for _ in range(5))
    assert tracker.transferred == shared.nbytes
    loss.backward()
    assert torch.allclose(weight.grad, 5 * shared.sum(0)[:, None].expand(16, 16), atol=1e-4)


def test_a_tensor_changed_between_two_savings_is_two():
    technique, x = offload(), torch.ones(8, 8)
    weight = torch.ones(8, 8, requires_grad=True)
    with technique.context():
        loss = (x @ weight).sum()
        x.mul_(2)  # in the plain run this would be an error; offloaded, the first product keeps its own values
        loss = loss + (x @ weight).sum()
    loss.backward()
    assert torch.equal(weight.grad, torch.full((8, 8), 24.0))


def test_layouts_come_back_as_they_were():
    technique = offload()
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for tensor in (x, torch.randn(6, 4).t(), torch.randn(2, 3, 4)[:, 1:]):
        weight = tensor.clone().requires_grad_()
        with technique.context():
            product = weight * tensor
        saved = product.grad_fn._saved_other
        assert torch.equal(saved, tensor)
        assert saved.is_contiguous(memory_format=torch.channels_last) == (tensor is x)


def test_weights_and_small_things_stay():
    model, technique = Chain(2), offload(min_bytes=2048)
    technique.wrap(model, model.groups)
    with technique.context(), MemoryTracker() as tracker:
        model(torch.randn(16, 16))  # 1 KiB activations
    assert tracker.transferred == 0
    with offload(min_bytes=1).context(), MemoryTracker() as tracker:
        model(torch.randn(16, 16))
    assert tracker.transferred > 0
