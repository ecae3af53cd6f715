"""Qwen-Image's transformer in fp16, which its activations pass by far: they reach twenty million in the last blocks.

As Draw Things does it (engineering.drawthings.ai, "Optimizing Qwen Image for Edge Devices"): the streams of both modalities are
summed in float32, and what goes into them is computed at a fraction of its size, in fp16. Queries and keys have norms, which
take the size off again once their epsilon is as much smaller; biases are scaled with the rest. Powers of two, so nothing is
rounded. bf16 needs none of it.
"""

from typing import Any

import torch
from torch import Tensor, nn

ATTENTION, MLP, LAST_MLP = 2.0**-4, 2.0**-5, 2.0**-9


@torch.no_grad()
def keep_in_range(transformer: Any) -> None:
    """Of a loaded QwenImageTransformer2DModel, or of one on meta; before adapters are put on it."""
    for layer in (transformer.img_in, transformer.txt_in):
        layer.register_forward_hook(_in_float32)
    for layer in (transformer.time_text_embed.timestep_embedder, transformer.norm_out.linear, transformer.proj_out):
        layer.register_forward_pre_hook(_in_half)
    for number, block in enumerate(transformer.transformer_blocks):
        _scale_attention(block.attn)
        last = number == len(transformer.transformer_blocks) - 1
        for mlp in (block.img_mlp, block.txt_mlp):
            _scale_mlp(mlp, LAST_MLP if last else MLP)


def _scale_attention(attention: Any) -> None:
    attention.register_forward_pre_hook(_smaller, with_kwargs=True)
    attention.register_forward_hook(lambda _, inputs, out: tuple(each.float() / ATTENTION for each in out))
    for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
        getattr(attention, name).bias.mul_(ATTENTION)
    attention.to_out[0].bias.mul_(ATTENTION)
    for norm in (attention.norm_q, attention.norm_k, attention.norm_added_q, attention.norm_added_k):
        norm.eps *= ATTENTION**2


def _scale_mlp(mlp: Any, factor: float) -> None:
    """Between its layers stands a dropout that no adapter is put on."""
    mlp.register_forward_pre_hook(_in_half)
    mlp.net[1].register_forward_hook(lambda _, inputs, out: out * factor)
    mlp.net[2].bias.mul_(factor)
    mlp.register_forward_hook(lambda _, inputs, out: out.float() / factor)


def _smaller(attention: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    streams = {name: (named[name] * ATTENTION).half() for name in ("hidden_states", "encoder_hidden_states")}
    return inputs, {**named, **streams}


def _in_float32(layer: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
    return out.float()


def _in_half(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return (inputs[0].half(), *inputs[1:])
