"""Layers with a LoHa or a LoKr beside them, which never hold the change of the weight as a whole.

LoHa (Hyeon-Woo et al. 2022, FedPara): ΔW = scale · (w1_a w1_b) ∘ (w2_a w2_b), made some rows at a time, in the forward pass
and again in the backward pass. LoKr (Edalati et al. 2022, as LyCORIS has it): ΔW = scale · w1 ⊗ w2, applied factor by
factor. Convolutions as LyCORIS flattens them: (out, in · kh · kw). Left out: Tucker decomposition, LoKr's split first factor.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

AT_ONCE = 1 << 22
"""Weights of ΔW that exist at a time, in float32."""


class AdaptedLayer(nn.Module):
    """A frozen linear or convolution layer and what is trained beside it. The factors are float32 on the layer's device."""

    kind: ClassVar[str]
    zero: str
    """The factor that starts at zero, so that the layer answers as its base."""
    deviations: dict[str, float]
    """Factor -> standard deviation of its start; those without one start as linear layers do."""

    def __init__(self, base_layer: nn.Module, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        assert isinstance(base_layer, (nn.Linear, nn.Conv2d))
        if isinstance(base_layer, nn.Conv2d):
            assert (base_layer.groups, base_layer.padding_mode) == (1, "zeros"), "no adapter for such a convolution"
        self.base_layer, self.rank, self.scale, self.enabled = base_layer, rank, scale, True
        self.lora_dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def _add_factors(self, **shapes: tuple[int, ...]) -> None:
        device = self.weight.device
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device)))

    def factors(self) -> dict[str, nn.Parameter]:
        """By the names that files give them."""
        return {name: p for name, p in self._parameters.items() if p is not None}

    @property
    def weight(self) -> Tensor:
        """Models ask their layers for its dtype and device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def enable_adapters(self, enabled: bool) -> None:
        self.enabled = enabled

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.base_layer(input, *args, **kwargs)
        if not self.enabled:
            return output
        own = next(iter(self.factors().values())).dtype
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        return (output + self.change(self.lora_dropout(input).to(dtype))).to(output.dtype)

    @abstractmethod
    def change(self, input: Tensor) -> Tensor:
        """What ΔW makes of the input, in the input's dtype."""


class LohaLayer(AdaptedLayer):
    kind = "loha"
    zero = "hada_w2_a"

    def __init__(self, base_layer: nn.Module, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base_layer, rank, scale, dropout)
        self.deviations = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_b": 1.0}  # LyCORIS's
        rows, columns = self.weight.shape[0], self.weight.shape[1:].numel()
        self._add_factors(
            hada_w1_a=(rows, rank), hada_w1_b=(rank, columns), hada_w2_a=(rows, rank), hada_w2_b=(rank, columns)
        )

    def change(self, input: Tensor) -> Tensor:
        return cast(Tensor, _Hadamard.apply(self.base_layer, self.scale, input, *self.factors().values()))


class LokrLayer(AdaptedLayer):
    kind = "lokr"

    def __init__(
        self, base_layer: nn.Module, rank: int, scale: float, dropout: float = 0.0, factor: int | None = None
    ) -> None:
        super().__init__(base_layer, rank, scale, dropout)
        (out_l, out_k), (in_m, in_n) = (split(size, factor) for size in self.weight.shape[:2])
        kernel, full = tuple(self.weight.shape[2:]), is_whole(self.weight.shape, rank, factor)
        self.shape, self.zero, self.deviations = (out_k, in_n, *kernel), "lokr_w2" if full else "lokr_w2_b", {}
        if full:
            self.scale = 1.0  # LyCORIS's rule, which readers know: alpha belongs to the low-rank form
            self._add_factors(lokr_w1=(out_l, in_m), lokr_w2=self.shape)
        else:
            columns = math.prod(self.shape[1:])
            self._add_factors(lokr_w1=(out_l, in_m), lokr_w2_a=(out_k, rank), lokr_w2_b=(rank, columns))

    def change(self, input: Tensor) -> Tensor:
        """x as a matrix (m, n): w1 x w2ᵀ, without w1 ⊗ w2."""
        factors = self.factors()
        first = factors["lokr_w1"] * self.scale
        in_m = first.shape[1]
        if isinstance(self.base_layer, nn.Conv2d):
            batch, places = len(input), input.shape[2:]
            inner = self._convolve(input.reshape(batch * in_m, -1, *places))  # (B m, k, H, W)
            mixed = F.linear(inner.view(batch, in_m, *inner.shape[1:]).movedim(1, -1), first)  # (B, k, H, W, l)
            return mixed.movedim(-1, 1).flatten(1, 2)
        inner = self._second(input.view(*input.shape[:-1], in_m, -1))  # (…, m, k)
        return F.linear(inner.transpose(-1, -2), first).transpose(-1, -2).flatten(-2)

    def _second(self, input: Tensor) -> Tensor:
        factors = self.factors()
        if "lokr_w2" in factors:
            return F.linear(input, factors["lokr_w2"])
        return F.linear(F.linear(input, factors["lokr_w2_b"]), factors["lokr_w2_a"])

    def _convolve(self, input: Tensor) -> Tensor:
        factors, how = self.factors(), _how(self.base_layer)
        if "lokr_w2" in factors:
            return F.conv2d(input, factors["lokr_w2"], None, *how)
        down, up = factors["lokr_w2_b"].view(-1, *self.shape[1:]), factors["lokr_w2_a"]
        return F.conv2d(F.conv2d(input, down, None, *how), up[:, :, None, None])


LAYERS: dict[str, type[AdaptedLayer]] = {layer.kind: layer for layer in (LohaLayer, LokrLayer)}


def split(size: int, factor: int | None) -> tuple[int, int]:
    """(small, large) whose product is `size`: `factor` where it divides, else the largest divisor up to it and to √size."""
    if factor and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    limit = min(math.isqrt(size), factor or size)
    small = next(divisor for divisor in range(limit, 0, -1) if size % divisor == 0)
    return small, size // small


def is_whole(shape: Sequence[int], rank: int, factor: int | None) -> bool:
    """Whether a LoKr of this rank keeps its second factor as it is, since two matrices would be no smaller."""
    return rank >= max(split(size, factor)[1] for size in shape[:2]) / 2


def _how(layer: nn.Module) -> tuple[Any, ...]:
    return layer.stride, layer.padding, layer.dilation


class _Hadamard(torch.autograd.Function):
    """x → ΔW x. Keeps the input and the factors; ΔW is made anew for the backward pass."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, scale: float, input: Tensor, *factors: Tensor) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        ctx.save_for_backward(input, *factors)
        with torch.autocast(input.device.type, enabled=False):
            parts = [applied(layer, input, _product(scale, rows, *factors)) for rows in _rows(layer)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, _channels(layer))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, w1_a, w1_b, w2_a, w2_b = ctx.saved_tensors
        layer, to_input = ctx.layer, None
        found = [torch.zeros_like(factor) for factor in (w1_a, w1_b, w2_a, w2_b)]
        with torch.autocast(input.device.type, enabled=False):
            for rows in _rows(layer):
                left, right = w1_a[rows] @ w1_b, w2_a[rows] @ w2_b
                part = _sliced(layer, gradient, rows)
                if ctx.needs_input_grad[2]:
                    weight = (left * right).mul_(ctx.scale)
                    added = _input_gradient(layer, input, weight, part)
                    to_input = added if to_input is None else to_input.add_(added)
                slope = _weight_gradient(layer, input, part).to(w1_a.dtype).mul_(ctx.scale)  # (rows, columns)
                to_left, to_right = right.mul_(slope), left.mul_(slope)
                found[0][rows], found[2][rows] = to_left @ w1_b.T, to_right @ w2_b.T
                found[1] += w1_a[rows].T @ to_left
                found[3] += w2_a[rows].T @ to_right
        return None, None, to_input, *found


def _rows(layer: Any) -> Iterator[slice]:
    rows, columns = layer.weight.shape[0], layer.weight.shape[1:].numel()
    height = max(1, AT_ONCE // columns)
    return (slice(at, min(at + height, rows)) for at in range(0, rows, height))


def _product(scale: float, rows: slice, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor) -> Tensor:
    return (w1_a[rows] @ w1_b).mul_(w2_a[rows] @ w2_b).mul_(scale)


def applied(layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    """What `layer` would make of the input with this weight, (out, in · kh · kw), and no bias."""
    weight = weight.to(input.dtype)
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(input, weight.view(len(weight), *layer.weight.shape[1:]), None, *_how(layer))
    return F.linear(input, weight)


def _channels(layer: nn.Module) -> int:
    return 1 if isinstance(layer, nn.Conv2d) else -1


def _sliced(layer: nn.Module, gradient: Tensor, rows: slice) -> Tensor:
    return gradient[:, rows] if isinstance(layer, nn.Conv2d) else gradient[..., rows]


def _input_gradient(layer: nn.Module, input: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    weight = weight.to(gradient.dtype)
    if isinstance(layer, nn.Conv2d):
        return conv2d_input(input.shape, weight.view(len(weight), *layer.weight.shape[1:]), gradient, *_how(layer))
    return gradient @ weight


def _weight_gradient(layer: nn.Module, input: Tensor, gradient: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        shape = (gradient.shape[1], *layer.weight.shape[1:])
        return conv2d_weight(input, shape, gradient, *_how(layer)).flatten(1)
    return gradient.flatten(0, -2).T @ input.flatten(0, -2)
