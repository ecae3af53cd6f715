"""The checkpoint itself: any arguments, the same random numbers, inputs where hooks see them, and one run per pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lora_trainer.engine.recompute import in_checkpoint, in_recomputation, recompute


class Counting:
    """A function and how often it ran, first and second time."""

    def __init__(self, function: Any) -> None:
        self.function, self.first, self.second = function, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert in_checkpoint()
        if in_recomputation():
            self.second += 1
        else:
            self.first += 1
        return self.function(*args, **kwargs)


def both(function: Any, make: Any) -> tuple[Any, Any]:
    """Gradients of the leaves that `make` returns after (args, kwargs), without and with recomputation."""
    found = []
    for run in (lambda f, a, k: f(*a, **k), recompute):
        torch.manual_seed(0)
        args, kwargs, leaves = make()
        out = run(function, args, kwargs)
        sum(x.square().sum() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)).backward()
        found.append([leaf.grad for leaf in leaves] + [torch.rand(3)])
    return tuple(found)


def test_nested_arguments_and_results():
    def function(pair: Any, *, scale: Any, flag: bool, nothing: None) -> Any:
        (a, b), factor = pair, scale["by"]
        assert flag
        return {"x": (a * factor).tanh(), "y": [b.exp() * a, "text", None]}

    def make() -> Any:
        a, b, by = (torch.randn(3, requires_grad=True) for _ in range(3))
        return ((a, b),), {"scale": {"by": by}, "flag": True, "nothing": None}, [a, b, by]

    plain, again = both(function, make)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_random_numbers_repeat_and_those_after_are_untouched():
    def function(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5).tanh() * torch.rand(100)

    def make() -> Any:
        x = torch.randn(100, requires_grad=True)
        return (x,), {}, [x]

    plain, again = both(function, make)
    assert all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))


def test_the_first_block_trains_although_its_input_needs_no_gradient():
    layer = Counting(nn.Linear(4, 4))
    recompute(layer, (torch.randn(2, 4),), {}).sum().backward()
    assert (layer.first, layer.second) == (1, 1)
    assert layer.function.weight.grad is not None


def test_where_nothing_trains_nothing_runs_again():
    layer = Counting(nn.Linear(4, 4).requires_grad_(False))
    out = recompute(layer, (torch.randn(2, 4),), {})
    assert not out.requires_grad
    assert (layer.first, layer.second) == (1, 0)


def test_only_the_inputs_are_kept_and_hooks_see_them():
    seen: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    x = torch.randn(2, 5, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = recompute(
            lambda x, scale: ((x * 2).exp() @ torch.randn(5, 7) * scale).tanh(), (x,), {"scale": torch.ones(7)}
        )
    assert seen == [torch.Size([2, 5]), torch.Size([7])]
    out.sum().backward()
    assert x.grad is not None


class Hidden(torch.autograd.Function):
    """As libraries do with packed weights: what the backward pass needs is kept out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert bool(ctx.weight.any()), "the block had not run again"
        return gradient @ ctx.weight.t(), None


def test_a_block_runs_again_before_its_first_node():
    """Nothing it saved asks for that; streamed weights must be in their slot all the same."""
    weight, x = torch.zeros(4, 4), torch.randn(2, 4, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        weight.fill_(1.0)
        return Hidden.apply(x, weight.detach())

    out = recompute(function, (x,), {})
    weight.zero_()
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 4.0))


def test_an_input_changed_in_place_is_an_error():
    x = torch.randn(3)
    weight = torch.randn(3, requires_grad=True)
    out = recompute(lambda x: x * weight, (x,), {})
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_that_does_not_repeat_itself_is_an_error():
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(0)
        return x.exp() if len(calls) == 1 else x + 1

    with pytest.raises(AssertionError, match="saved less"):
        recompute(function, (torch.randn(3, requires_grad=True),), {}).sum().backward()


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_as_it_was(inside):
    layer, seen = nn.Linear(4, 4), []

    def function(x: Tensor) -> Tensor:
        out = layer(x)
        seen.append(out.dtype)
        return out.tanh()

    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        loss = recompute(function, (torch.randn(2, 4),), {}).float().sum()
    loss.backward()
    assert seen == [torch.bfloat16 if inside else torch.float32] * 2
