"""CUDA's autocast on CPU tensors: plans for a card are made in the card's arithmetic, whatever the machine.

Autocast has a list for each device of operators that take and give float32. CUDA's is the longer: norms, softmax, sums, powers
and interpolations of 16 bits give 32 there and 16 on the CPU, a fifth of a U-Net's activations. Within `cudas_autocast()` the
operators that CUDA's autocast knows and the CPU's does not behave as CUDA's, below Python, where autocast itself acts. Which they
are is asked of PyTorch, so that its version does not matter; only what is not float32 among them is told here.

After aten/src/ATen/autocast_mode.h. Left out: operators of several inputs that take the widest of their dtypes (addcmul, …),
which differ from the CPU's type promotion in the dtype of nothing that fakes could see.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

LOWER = (
    "_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "addmv", "addr", "mv", "chain_matmul",
    "einsum", "linalg_multi_dot", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell",
)  # fmt: skip
"""Made in 16 bits; of what they are made of, the CPU's autocast knows the same."""
PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "scatter_add", "tensordot",
)  # fmt: skip
"""Made in the widest dtype among their inputs, as they are without autocast."""
DTYPE_ASKED = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum")
"""They sum in float32 and give it, without a float32 copy of their input: `dtype` is set where it was not."""

SIXTEEN = (torch.float16, torch.bfloat16)
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cudas_autocast() -> Iterator[None]:
    """Inside, `torch.autocast("cpu")` keeps CUDA's lists."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in float32_operators():
            library.impl(name, _kernel(name), "AutocastCPU")
        yield


def float32_operators() -> list[str]:
    """Names with overloads, "softmax.int", of what gives float32 under CUDA's autocast and not under the CPU's."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    ours = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    cudas = (name for name in ours if has(name, "AutocastCUDA") and not has(name, "AutocastCPU"))
    named = (name.removeprefix("aten::") for name in cudas)
    return sorted(name for name in named if name.partition(".")[0] not in (*LOWER, *PROMOTED))


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    asks = packet in DTYPE_ASKED and any(argument.name == "dtype" for argument in operator._schema.arguments)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if asks:
                return _summed(operator, args, kwargs)
            return operator(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    return run


def _summed(operator: Any, args: Any, kwargs: Any) -> Any:
    told = _told(operator, args, kwargs)
    if args[0].dtype not in SIXTEEN or told:
        return operator(*args, **kwargs)
    if operator._schema.name == "aten::softmax":
        return torch.ops.aten._softmax.default(args[0], args[1] if len(args) > 1 else kwargs["dim"], True)
    names = [argument.name for argument in operator._schema.arguments]
    positional = args[: names.index("dtype")]
    return operator(*positional, **{**kwargs, "dtype": torch.float32})


def _told(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether the caller chose a dtype."""
    if kwargs.get("dtype") is not None:
        return True
    place = [argument.name for argument in operator._schema.arguments].index("dtype")
    return len(args) > place and args[place] is not None


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in SIXTEEN else value
