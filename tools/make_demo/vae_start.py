"""Set an autoencoder to average pooling, so that only its decoder needs training, and that for minutes.

A VAE started at random spends most of its time learning to carry plain colours through its group normalisations, which
take out the very mean and scale that a flat colour is. Here the residual branches are zero and the skip paths are set
so that the encoder averages each 4x4 patch into three latent channels (red, green, blue), the fourth being a difference
along the patch's diagonal, and the decoder repeats the colours; what is left to learn are the edges. Two tricks make
the last normalisation and its SiLU nearly linear:

- each group holds the constants +C and -C, which dominate its variance, so that the division is by a constant;
- each signal s goes in as s and -s, for silu(s) - silu(-s) = s.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

CONSTANT = 8.0
SIGNALS = 4  # red, green, blue, difference along the diagonal


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias


def _carry(conv: nn.Conv2d, stride: int = 1) -> None:
    """Let the signals pass through a 3x3 or 1x1 convolution; with stride 2, average the four pixels it merges."""
    conv.weight[:SIGNALS] = 0
    _bias(conv)[:SIGNALS] = 0
    middle = conv.kernel_size[0] // 2
    for i in range(min(SIGNALS, conv.in_channels)):
        if stride == 2:  # diffusers pads at the right and bottom, so the first two taps are the patch
            conv.weight[i, i, :2, :2] = 0.25
        else:
            conv.weight[i, i, middle, middle] = 1


def _difference(conv: nn.Conv2d) -> None:
    """Signal 3 of the second downsampling: brightness of the upper left minus that of the lower right."""
    conv.weight[3] = 0
    conv.weight[3, :3, 0, 0] = 1 / 3
    conv.weight[3, :3, 1, 1] = -1 / 3


def _lay_out(conv: nn.Conv2d, group: int) -> None:
    """From the signals to groups (s, -s, C, -C, nothing...) of the given size, in a 1x1 convolution."""
    _bias(conv).zero_()
    for i in range(SIGNALS):
        rows = slice(group * i, group * i + 4)
        conv.weight[rows] = 0
        conv.weight[group * i, i] = 1
        conv.weight[group * i + 1, i] = -1
        _bias(conv)[rows] = torch.tensor([0.0, 0.0, CONSTANT, -CONSTANT])


def _read(conv: nn.Conv2d, group: int) -> None:
    """From the laid-out groups, normalised, to the output channels of a 3x3 convolution."""
    deviation = (2 * CONSTANT**2 / group) ** 0.5
    conv.weight.zero_()
    _bias(conv).zero_()
    for i in range(min(SIGNALS, conv.out_channels)):
        conv.weight[i, group * i, 1, 1] = deviation
        conv.weight[i, group * i + 1, 1, 1] = -deviation


@torch.no_grad()
def start_as_pooling(vae: AutoencoderKL, log_variance: float = -9.0) -> None:
    """Set the weights of a fresh factor-4 VAE with three levels and four groups to a normalisation."""
    for name, module in vae.named_modules():
        if name.endswith((".conv2", ".to_out.0")):
            module.weight.zero_()
            module.bias.zero_()
    encoder, decoder = vae.encoder, vae.decoder
    groups = encoder.conv_norm_out.num_groups
    _carry(encoder.conv_in)
    for block in encoder.down_blocks[:2]:
        _carry(block.downsamplers[0].conv, stride=2)
    _difference(encoder.down_blocks[1].downsamplers[0].conv)
    _carry(encoder.down_blocks[1].resnets[0].conv_shortcut)
    inner = encoder.conv_norm_out.num_channels // groups
    _lay_out(encoder.down_blocks[2].resnets[0].conv_shortcut, inner)
    _read(encoder.conv_out, inner)
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.weight.copy_(_identity(conv.weight))
        _bias(conv).zero_()
    vae.quant_conv.bias[vae.config.latent_channels :] = log_variance

    _carry(decoder.conv_in)
    for block in decoder.up_blocks[:2]:
        _carry(block.upsamplers[0].conv)
    _carry(decoder.up_blocks[1].resnets[0].conv_shortcut)
    outer = decoder.conv_norm_out.num_channels // groups
    _lay_out(decoder.up_blocks[2].resnets[0].conv_shortcut, outer)
    _read(decoder.conv_out, outer)


def _identity(weight: Tensor) -> Tensor:
    """The (C, C, 1, 1) weight of a 1x1 convolution that changes nothing."""
    return torch.eye(weight.shape[0])[:, :, None, None]


@torch.no_grad()
def pooled(vae: AutoencoderKL, x: Tensor) -> Tensor:
    """What the encoder computes to within a percent, a hundred times faster: (B, 3, H, W) to (B, 4, H/4, W/4)."""
    half = F.avg_pool2d(x, 2).mean(1, keepdim=True)
    difference = half[:, :, ::2, ::2] - half[:, :, 1::2, 1::2]
    means = torch.cat([F.avg_pool2d(x, 4), difference], 1)
    return F.conv2d(means, vae.quant_conv.weight[:SIGNALS, :SIGNALS], vae.quant_conv.bias[:SIGNALS])
