"""Qwen-Image's VAE, a video model's (Wan 2.1) that is given one frame: how to build it, find its weights, and pass images.

Its convolutions look at the present and at two frames before it, of which a picture has none. So they run in two dimensions,
with the kernel's last slice: the numbers are the same, at a third of the memory and the work, and no frame is kept for the
next. Latents are brought to mean 0 and deviation 1 channel by channel, as diffusers' QwenImagePipeline does it.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...bases.parts import Config, Slot
from ...bases.weights import Locate, Piece, Spelled
from ...diffusion.vae import Latents
from ...files.kinds import Part
from .signature import VAE_QWEN

RESNET = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6", "conv_shortcut": "shortcut"}
_OUTSIDE = {
    "quant_conv": "conv1", "post_quant_conv": "conv2",
    **{f"{side}.conv_in": f"{side}.conv1" for side in ("encoder", "decoder")},
    **{f"{side}.norm_out": f"{side}.head.0" for side in ("encoder", "decoder")},
    **{f"{side}.conv_out": f"{side}.head.2" for side in ("encoder", "decoder")},
}  # fmt: skip


def build(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import AutoencoderKLQwenImage
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    class ImageVae(AutoencoderKLQwenImage):
        def clear_cache(self) -> None:
            """Nothing is kept: there is no next frame."""
            self._feat_map = self._enc_feat_map = None

    vae = ImageVae.from_config(dict(config))
    for layer in vae.modules():
        if isinstance(layer, QwenImageCausalConv3d):
            layer.forward = functools.partial(_one_frame, layer)
    return cast(nn.Module, vae)


def _one_frame(layer: Any, x: Tensor, cache_x: None = None) -> Tensor:
    """(B, C, 1, H, W), after frames of zeros."""
    across, _, down = layer._padding[:3]
    made = F.conv2d(x[:, :, 0], layer.weight[:, :, -1], layer.bias, layer.stride[1:], (down, across))
    return made[:, :, None]


# -- reading


def original(name: str, num_res_blocks: int) -> str:
    """diffusers' name for a parameter -> Wan's."""
    layer, _, leaf = name.rpartition(".")
    if layer in _OUTSIDE:
        return f"{_OUTSIDE[layer]}.{leaf}"
    if middle := re.fullmatch(r"(encoder|decoder)\.mid_block\.(resnets|attentions)\.(\d)\.(.+)", layer):
        number = 1 if middle[2] == "attentions" else 2 * int(middle[3])
        return f"{middle[1]}.middle.{number}.{RESNET.get(middle[4], middle[4])}.{leaf}"
    if down := re.fullmatch(r"encoder\.down_blocks\.(\d+)\.(.+)", layer):
        return f"encoder.downsamples.{down[1]}.{RESNET.get(down[2], down[2])}.{leaf}"
    up = re.fullmatch(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", layer)
    assert up, f"no key for {name}"
    first, inner = int(up[1]) * (num_res_blocks + 2), num_res_blocks + 1 if up[2] == "upsamplers" else int(up[3])
    return f"decoder.upsamples.{first + inner}.{RESNET.get(up[4], up[4])}.{leaf}"


def locate(prefix: str, num_res_blocks: int) -> Locate:
    return lambda name: [Piece(prefix + original(name, num_res_blocks)), Piece(prefix + name)]


def derive(part: Part, standard: Config) -> tuple[Config, Locate]:
    """The encoder's layers stand in one row, in either naming: so many of a width, then one that halves the picture."""
    shape = Spelled(part.header, locate(part.prefix, 0)).shape
    widths: list[list[int]] = [[]]
    temporal: list[bool] = []
    number = 0
    while True:
        start = f"encoder.down_blocks.{number}"
        if conv := shape(f"{start}.conv1.weight"):
            widths[-1].append(conv[0])
        elif shape(f"{start}.resample.1.weight"):
            temporal.append(shape(f"{start}.time_conv.weight") is not None)
            widths.append([])
        else:
            break
        number += 1
    base = (shape("encoder.conv_in.weight") or (int(standard["base_dim"]),))[0]
    config = standard | {
        "base_dim": base, "dim_mult": [level[0] // base if level else 1 for level in widths],
        "num_res_blocks": len(widths[0]) or int(standard["num_res_blocks"]), "temperal_downsample": temporal,
        "z_dim": (shape("post_quant_conv.weight") or (int(standard["z_dim"]),))[0],
    }  # fmt: skip
    return config, locate(part.prefix, int(config["num_res_blocks"]))


QWEN_VAE = Slot(
    "vae", VAE_QWEN, "VAE Qwen-Image (qwen_image_vae.safetensors)", ("vae.", "first_stage_model."), build, derive,
    locate("", 2),
)  # fmt: skip


# -- running


def factor(config: Mapping[str, Any]) -> int:
    """Pixels a latent stands for, along each side."""
    return int(2 ** len(config["temperal_downsample"]))


def shape(config: Mapping[str, Any], size: tuple[int, int]) -> tuple[int, int, int]:
    """(C, H, W) of the latents of a picture of `size` (width, height) pixels."""
    width, height = (side // factor(config) for side in size)
    return int(config["z_dim"]), height, width


@torch.no_grad()
def encode(vae: nn.Module, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> float32 (B, C, H/8, W/8) on the CPU: the posterior's mean, of unit deviation."""
    weight = next(vae.parameters())
    latents = cast(Any, vae).encode(pixels.to(weight)[:, :, None]).latent_dist.mean[:, :, 0].float()
    mean, deviation = _statistics(vae, latents)
    return cast(Tensor, ((latents - mean) / deviation).cpu())


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """(B, C, h, w) -> float32 pixels (B, 3, H, W) in [-1, 1] on the CPU, one picture at a time."""
    weight = next(vae.parameters())
    mean, deviation = _statistics(vae, latents.to(weight.device))
    latents = latents.to(weight.device) * deviation + mean
    pixels = [cast(Any, vae).decode(one[None, :, None].to(weight)).sample[:, :, 0] for one in latents]
    return torch.cat(pixels).float().clamp(-1, 1).cpu()


def _statistics(vae: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    config: Any = vae.config
    return tuple(  # type: ignore[return-value]
        torch.tensor(values, device=like.device).view(1, -1, 1, 1) for values in (config.latents_mean, config.latents_std)
    )


LATENTS = Latents(encode, decode, shape)
