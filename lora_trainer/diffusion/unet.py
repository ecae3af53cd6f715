"""What sd15 and sdxl both say of a Stable Diffusion UNet: its blocks in execution order, its layers with LoRA."""

from collections.abc import Iterable, Iterator
from typing import Any

from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

from ..seam.family import BlockGroup

_ATTENTION = r"attn[12]\.to_(?:q|k|v|out\.0)"
_MLP = r"ff\.net\.(?:0\.proj|2)|proj_in|proj_out"
_CONV = r"conv1|conv2|conv_shortcut|time_emb_proj|downsamplers\.\d+\.conv|upsamplers\.\d+\.conv"

LORA_TARGETS = {
    "auto": rf"unet\..+\.(?:{_ATTENTION})",
    "attention": rf"unet\..+\.(?:{_ATTENTION})",
    "attention+mlp": rf"unet\..+\.(?:{_ATTENTION}|{_MLP})",
    # Not conv_in, conv_out and the time embedding: readers of kohya files look for layers inside the blocks.
    "all": rf"unet\.(?:down_blocks|mid_block|up_blocks)\..+\.(?:{_ATTENTION}|{_MLP})|"
    rf"unet\.(?:down_blocks|mid_block|up_blocks)\.(?:.+\.)?(?:{_CONV})",
}
TEXT_TARGETS = (
    r"text_encoder(?:_2)?\.(?:text_model\.)?encoder\.layers\.\d+\.(?:self_attn\.(?:q|k|v|out)_proj|mlp\.fc[12])"
)


def block_groups(model: nn.ModuleDict) -> list[BlockGroup]:
    """Residual blocks, transformer blocks and samplers of the UNet, then the layers of text encoders in the model."""
    unet: Any = model["unet"]
    groups = [
        BlockGroup("down", [b for level in unet.down_blocks for b in _level(level, "downsamplers")]),
        BlockGroup("mid", list(_middle(unet.mid_block)) if unet.mid_block is not None else []),
        BlockGroup("up", [b for level in unet.up_blocks for b in _level(level, "upsamplers")]),
    ]
    for name in ("text_encoder", "text_encoder_2"):
        if name in model:
            groups.append(BlockGroup(name, list(text_body(model[name]).encoder.layers)))
    return [group for group in groups if group.blocks]


def text_body(encoder: nn.Module) -> Any:
    """The CLIP transformer with `encoder` and `final_layer_norm`: transformers 5 flattened CLIPTextModel."""
    return getattr(encoder, "text_model", encoder)


def _level(level: Any, samplers: str) -> Iterator[nn.Module]:
    attentions = list(getattr(level, "attentions", []))
    for index, resnet in enumerate(level.resnets):
        yield resnet
        if attentions:
            yield from attentions[index].transformer_blocks
    yield from getattr(level, samplers, None) or ()


def _middle(middle: Any) -> Iterator[nn.Module]:
    yield middle.resnets[0]
    attentions: Iterable[Any] = getattr(middle, "attentions", [])
    for attention, resnet in zip(attentions, middle.resnets[1:], strict=False):
        if attention is not None:
            yield from attention.transformer_blocks
        yield resnet


BLOCK_TYPES = (ResnetBlock2D, BasicTransformerBlock, Downsample2D, Upsample2D)
"""All that block_groups finds in a UNet; a test holds it to that."""
