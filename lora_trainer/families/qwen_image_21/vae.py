"""Qwen-Image 2.1's VAE, Wan 2.2's made for one picture: 16 pixels a latent each way, 64 channels, and pictures have an alpha.

What we train on is opaque; what is drawn is laid on white. Its layers for time are in the files but have no work with one
frame, so they are left out, and nothing is kept for a next frame. ComfyUI's file has Wan's names, and kernels one frame deep.
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
from ..qwen_image import vae as _qwen_vae
from .signature import VAE_QWEN_21


def build(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import AutoencoderKLQwenImage21
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21DupUp3D

    class ImageVae(AutoencoderKLQwenImage21):
        def clear_cache(self) -> None:
            """Nothing is kept: there is no next frame."""
            self._feat_map = self._enc_feat_map = None

    vae = ImageVae.from_config(dict(config))
    for layer in vae.modules():
        layer._modules.pop("time_conv", None)
        if isinstance(layer, QwenImage21DupUp3D):
            layer.forward = functools.partial(_last_frame, layer)
    return cast(nn.Module, vae)


def _last_frame(layer: Any, x: Tensor, first_chunk: bool = True) -> Tensor:
    """(B, C, 1, H, W) -> (B, C', 1, 2 H, 2 W): of the frames it makes of one, the last, which is all that the first chunk keeps."""
    side = layer.factor_s**2
    first = (layer.factor_t - 1) * side
    wanted = torch.arange(layer.out_channels * layer.factor, device=x.device).view(layer.out_channels, -1)[:, first:]
    return F.pixel_shuffle(x[:, wanted.reshape(-1) // layer.repeats, 0], layer.factor_s)[:, :, None]


# -- reading


def original(name: str, num_res_blocks: int) -> str:
    """diffusers' name for a parameter -> Wan's, where a level's layers stand in one row."""
    layer, _, leaf = name.rpartition(".")
    found = re.fullmatch(r"(en|de)coder\.(?:down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)sampler)\.(.+)", layer)
    if found is None:
        return _qwen_vae.original(name, num_res_blocks)
    side, rows, depth = ("encoder", "downsamples", 0) if found[1] == "en" else ("decoder", "upsamples", 1)
    number = found[3] or num_res_blocks + depth
    return f"{side}.{rows}.{found[2]}.{rows}.{number}.{_qwen_vae.RESNET.get(found[4], found[4])}.{leaf}"


def locate(prefix: str, num_res_blocks: int) -> Locate:
    return lambda name: [Piece(prefix + original(name, num_res_blocks)), Piece(prefix + name)]


def derive(part: Part, standard: Config) -> tuple[Config, Locate]:
    """Widths; which levels shrank time no tensor of a picture's VAE tells."""
    file = Spelled(part.header, locate(part.prefix, 0))
    resnets = file.count("encoder.down_blocks.0.resnets.{}.conv1.weight")

    def side(name: str, index: int, known: str) -> int:
        found = file.shape(f"{name}.weight")
        return found[index] if found else int(standard[known])

    config = standard | {
        "base_dim": side("encoder.conv_in", 0, "base_dim"), "in_channels": side("encoder.conv_in", 1, "in_channels"),
        "decoder_base_dim": side("decoder.conv_out", 1, "decoder_base_dim"), "z_dim": side("post_quant_conv", 0, "z_dim"),
        "out_channels": side("decoder.conv_out", 0, "out_channels"),
        "num_res_blocks": resnets or int(standard["num_res_blocks"]),
    }  # fmt: skip
    return config, locate(part.prefix, int(config["num_res_blocks"]))


QWEN_21_VAE = Slot(
    "vae", VAE_QWEN_21, "VAE do Qwen-Image 2.1 (qwen_image_2.1_vae_bf16.safetensors)", ("vae.", "first_stage_model."),
    build, derive, locate("", 2),
)  # fmt: skip


# -- running


def encode(vae: nn.Module, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> float32 (B, C, H/16, W/16) on the CPU, of opaque pictures."""
    return _qwen_vae.encode(vae, torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1))


def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """(B, C, h, w) -> float32 pixels (B, 3, H, W) in [-1, 1] on the CPU, on white."""
    drawn = _qwen_vae.decode(vae, latents)
    colours, alpha = drawn[:, :3], (drawn[:, 3:] + 1) / 2
    return colours * alpha + (1 - alpha)


LATENTS = Latents(encode, decode, _qwen_vae.shape)
