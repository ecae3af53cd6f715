"""The streaming engine's promises: what streams, when it is copied, and that errors show."""

import copy
import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming_models import Chain, apply, gradients
from torch import nn

from lora_trainer.engine import streaming
from lora_trainer.engine.block_streaming import choose, streamable_bytes, streaming_report
from lora_trainer.engine.host import compute_device
from lora_trainer.seam.family import BlockGroup
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.gradient_checkpointing import GradientCheckpointing

STREAMING, CHECKPOINTING = BlockStreaming(), GradientCheckpointing()

# -- which blocks stream


@settings(max_examples=50, deadline=None)
@given(widths=st.lists(st.integers(1, 64), min_size=1, max_size=30), fraction=st.floats(0, 1))
def test_the_share_is_met_everywhere_along_the_model(widths, fraction):
    """Bytes and even spacing: over every prefix the streamed bytes are within the largest block of the share."""
    blocks = [nn.Linear(width, width, device="meta").requires_grad_(False) for width in widths]
    sizes = [streaming.frozen_bytes(block) for block in blocks]
    chosen = {id(block) for block in choose(blocks, fraction)}
    streamed = passed = 0
    for block, size in zip(blocks, sizes, strict=True):
        passed += size
        streamed += size if id(block) in chosen else 0
        assert abs(streamed - fraction * passed) <= max(sizes)


def test_all_or_nothing_and_every_other():
    blocks = list(Chain(8).blocks)
    assert choose(blocks, 1.0) == blocks
    assert choose(blocks, 0.0) == []
    assert choose(blocks, 0.5) == blocks[::2]
    assert streamable_bytes([BlockGroup("", blocks)]) == 8 * 16 * 16 * 4


def test_layers_are_told_their_home_before_weights_are_read():
    with torch.device("meta"):
        model = Chain(4)
    BlockStreaming(fraction=0.5).convert(model, model.groups)
    homes = [getattr(module, "home", None) for module in (model.stem, *(block.linear for block in model.blocks))]
    cpu = torch.device("cpu")
    assert homes == [None, cpu, None, cpu, None]


def test_what_was_marked_is_what_streams():
    """Packing changes sizes between the two moments, which must not change the choice."""
    model = Chain(4)
    model.blocks[2].home = torch.device("cpu")
    apply(model, BlockStreaming(fraction=0.9), CHECKPOINTING)
    assert [isinstance(getattr(b.forward, "forward", None), streaming.Streamed) for b in model.blocks] == [
        False, False, True, False,
    ]  # fmt: skip


# -- the engine


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_gradients_are_those_of_the_plain_model(slots, packed):
    torch.manual_seed(0)
    plain, x = Chain(packed=packed), torch.randn(3, 16)
    streamed = apply(copy.deepcopy(plain), BlockStreaming(slots=slots), CHECKPOINTING)
    for _ in range(3):
        for got, expected in zip(gradients(streamed, x), gradients(plain, x), strict=True):
            assert torch.equal(got, expected)


def test_once_learned_no_block_waits_and_none_comes_twice():
    """Per step: every block in, all but the two that the turn finds in their slots in again, the next step's first two kept."""
    model, x = apply(Chain(6), STREAMING, CHECKPOINTING), torch.randn(3, 16)
    gradients(model, x)
    first = streaming_report(model)
    assert (first.blocks, first.ring_bytes, first.host_bytes) == (6, 2 * 1024, 6 * 1024)
    gradients(model, x)
    second = streaming_report(model)
    assert second.late - first.late <= 1
    assert second.loads - first.loads == (6 - 2) + (6 - 2)


def test_sampling_goes_round_and_training_finds_its_way_again():
    model, x = apply(Chain(6), STREAMING, CHECKPOINTING), torch.randn(3, 16)
    gradients(model, x)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        before = streaming_report(model)
        model(x)
    after = streaming_report(model)
    assert (after.loads - before.loads, after.late - before.late) == (6, 0)
    torch.manual_seed(0)
    plain = Chain(6)
    streamed = apply(copy.deepcopy(plain), STREAMING, CHECKPOINTING)
    with torch.no_grad():
        streamed(x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(streamed, x), gradients(plain, x), strict=True))


def test_weights_keep_address_dtype_and_kind():
    model = apply(Chain(4, packed=True), STREAMING, CHECKPOINTING)
    before = {name: value.data_ptr() for name, value in model.blocks.state_dict().items()}
    gradients(model, torch.randn(3, 16))
    assert {name: value.data_ptr() for name, value in model.blocks.state_dict().items()} == before
    first = model.blocks[0]
    assert not isinstance(first.linear.weight, nn.Parameter)
    assert isinstance(first.linear.bias, nn.Parameter)
    assert (first.codes.dtype, first.codes.data_ptr() % streaming.ALIGNMENT) == (
        torch.uint8,
        model.blocks[2].codes.data_ptr() % 256,
    )
    assert first.linear.weight.data_ptr() == model.blocks[2].linear.weight.data_ptr()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in Chain(4, packed=True).named_modules()]


def test_a_tensor_under_two_names_stays_one():
    model = Chain(3)
    model.blocks[0].register_buffer("again", model.blocks[0].linear.weight.data)
    model.blocks[0].linear._parameters["weight"] = model.blocks[0].again
    apply(model, STREAMING, CHECKPOINTING)
    assert model.blocks[0].again is model.blocks[0].linear.weight
    assert streaming_report(model).host_bytes == 3 * 1024


def test_masters_never_change():
    model = apply(Chain(4), STREAMING, CHECKPOINTING)
    masters = model.blocks[0].forward.forward.ring.masters
    before = [master.buffer.clone() for master in masters]
    gradients(model, torch.randn(3, 16))
    assert all(torch.equal(master.buffer, copy_) for master, copy_ in zip(masters, before, strict=True))


@pytest.mark.parametrize("at", [0, 3])
def test_a_slot_overwritten_too_early_is_an_error(at):
    """The hazard of every streaming scheme: a silently wrong gradient."""
    model, x = apply(Chain(4), STREAMING, CHECKPOINTING), torch.randn(3, 16)
    streamed = model.blocks[at].forward.forward
    forward, slot = streamed.forward, streamed.ring.buffers[at % 2]

    class Spoil(torch.autograd.Function):
        """Runs in the block's backward pass before that of its linear layer."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            slot.zero_()
            return gradient

    streamed.forward = lambda x: Spoil.apply(forward(x))
    with pytest.raises(RuntimeError, match="overwritten after the block ran again"):
        model(x.requires_grad_()).sum().backward()


def test_a_slot_overwritten_between_the_passes_does_no_harm():
    torch.manual_seed(0)
    plain, x = Chain(4), torch.randn(3, 16)
    model = apply(copy.deepcopy(plain), STREAMING, CHECKPOINTING)
    loss = model(x).square().sum()
    with torch.no_grad():
        model(torch.zeros(3, 16))  # a forward pass of another's, which leaves other blocks in the slots
    loss.backward()
    expected = gradients(plain, x)
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_without_checkpointing_are_refused():
    model = apply(Chain(4), STREAMING)
    with pytest.raises(AssertionError, match="needs gradient checkpointing"):
        model(torch.randn(3, 16))
    with torch.no_grad():
        assert model(torch.randn(3, 16)).isfinite().all()


def test_streaming_outside_checkpointing_is_a_bug():
    model = apply(Chain(4), CHECKPOINTING)
    with pytest.raises(AssertionError, match="must come before"):
        STREAMING.wrap(model, model.groups)


def test_after_an_error_in_the_middle_the_step_can_be_redone():
    torch.manual_seed(0)
    plain, x = Chain(6), torch.randn(3, 16)
    model = apply(copy.deepcopy(plain), STREAMING, CHECKPOINTING)
    gradients(model, x)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("injected")

    for place, hook in ((3, model.blocks[3].linear.register_forward_hook(fail)), (1, None)):
        if hook is None:
            hook = model.blocks[place].linear.bias.register_hook(fail)
        with pytest.raises(RuntimeError, match="injected"):
            gradients(model, x)
        hook.remove()
        model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), gradients(plain, x), strict=True))


def test_master_in_a_file_leaves_none_behind(tmp_path):
    torch.manual_seed(0)
    plain, x = Chain(4), torch.randn(3, 16)
    model = copy.deepcopy(plain)
    technique = BlockStreaming(mapped=True, folder=str(tmp_path / "masters"))
    technique.convert(model, model.groups)
    for block in model.blocks:
        block.linear.stow()
        block.linear.bias.requires_grad_(True)  # this model trains what was read
    apply(model, technique, CHECKPOINTING)
    assert not hasattr(model.blocks[0].linear, "stow")
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), gradients(plain, x), strict=True))
    del model
    gc.collect()
    assert list(Path(tmp_path / "masters").iterdir()) == []


def test_a_quantised_parameter_class_is_refused():
    class Packed(nn.Parameter):
        pass

    model = Chain(2)
    model.blocks[0].linear.weight = Packed(torch.zeros(16, 16), requires_grad=False)
    with pytest.raises(AssertionError, match="flat buffer"):
        apply(model, STREAMING)


# -- where a model computes


def test_a_table_on_the_cpu_says_nothing_of_a_model_on_a_card():
    """As Chroma's table of sines, which comes first among its tensors; "meta" stands for the card."""
    model = nn.Sequential(nn.Module(), nn.Linear(4, 4, device="meta"))
    model[0].register_buffer("table", torch.zeros(3))
    assert compute_device(model).type == "meta"
    assert compute_device(nn.Sequential(model[0], nn.Linear(4, 4))).type == "cpu"
