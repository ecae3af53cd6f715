"""Original (ldm, sgm) single files: how each diffusers or transformers name is spelled there.

The maps go from the module's name to the file's key, so that every parameter is asked for once and whatever is left in
the file can be named. Text encoder 1 and 2 are told apart by their prefix, never by their width.
"""

import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from ..files.headers import Header
from ..files.kinds import Part, find_unet, wrapper
from .weights import Locate, Piece

_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
_UNET_STEM = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2", "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0", "conv_out": "out.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_UNET_BLOCK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_UNET_MID = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")
_VAE_LEVEL = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets\.(\d+)|downsamplers\.0|upsamplers\.0)\.(.+)")
_VAE_ATTENTION = {  # diffusers -> ldm, and diffusers' own names before 0.15
    "group_norm": ("norm", "group_norm"), "to_q": ("q", "query"), "to_k": ("k", "key"), "to_v": ("v", "value"),
    "to_out.0": ("proj_out", "proj_attn"),
}  # fmt: skip
_OPEN_CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip

IGNORED = re.compile(
    r"""^(state_dict\.)?(
    (sqrt_|log_)?(one_minus_|recip_|recipm1_)?(alphas|betas) | posterior_ | logvar | lvlb_weights | scale_factor
    | loss\. | model_ema\. | denoiser\. | edm_ | v_pred$ | ztsnr$ | global_step
    | first_stage_model\.(loss|model_ema)\. | cond_stage_model\.model\.visual\.
    | cond_stage_model\.model\.transformer\.resblocks\.23\. )
    | (position_ids | logit_scale | attn_mask | scale_input | input_scale | scaled_fp8)$
    | text_projection(\.weight)?$""",
    re.VERBOSE,
)
"""Keys that a LoRA has no use for: losses, schedules, averages, CLIP's contrastive head, SD2's unused last layer."""


def leftovers(header: Header, used: Collection[str]) -> list[str]:
    """Keys of the file that nobody reads and that are not known to be of no use."""
    used = set(used)
    return sorted(key for key in header if key not in used and not IGNORED.search(key))


# -- the parts of a file


def unet_part(header: Header) -> Part:
    part = find_unet(header)
    assert part is not None, "only files with a UNet come here"
    return part


def vae_part(header: Header) -> Part | None:
    """The VAE in the original layout, inside a checkpoint or alone."""
    for prefix in (wrapper(header) + "first_stage_model.", "first_stage_model.", "vae.", ""):
        part = Part(header, prefix)
        if "encoder.down.0.block.0.conv1.weight" in part:
            return part
    return None


def text_part(header: Header, prefix: str) -> Part:
    """`prefix` such as "cond_stage_model." or "conditioner.embedders.1."."""
    return Part(header, wrapper(header) + prefix)


# -- module name -> key


def _renamed(name: str, table: Mapping[str, str]) -> str:
    """The name with its leading part replaced."""
    for old, new in table.items():
        if name.startswith(old + "."):
            return new + name[len(old) :]
    raise AssertionError(f"no key for {name}")


def locate_unet(part: Part, config: Mapping[str, Any]) -> Locate:
    layers = int(config["layers_per_block"])
    return lambda name: [Piece(part.key(each)) for each in original_unet_names(name, layers)]


def original_unet_names(name: str, layers: int) -> list[str]:
    """input_blocks and output_blocks number all layers of all levels in one row. An upsampler comes after the attention, if
    its level has any: both places are named."""
    if m := _UNET_BLOCK.fullmatch(name):
        side, level, kind, index, rest = m[1], int(m[2]), m[3], int(m[4]), m[5]
        first = 1 + level * (layers + 1) if side == "down" else level * (layers + 1)
        row = "input_blocks" if side == "down" else "output_blocks"
        if kind == "resnets":
            return [f"{row}.{first + index}.0.{_renamed(rest, _RESNET)}"]
        if kind == "attentions":
            return [f"{row}.{first + index}.1.{rest}"]
        if kind == "downsamplers":
            return [f"{row}.{first + layers}.0.op.{rest.removeprefix('conv.')}"]
        return [f"{row}.{first + layers}.{place}.{rest}" for place in (2, 1)]
    if m := _UNET_MID.fullmatch(name):
        attention = m[1] == "attentions"
        return [f"middle_block.1.{m[3]}" if attention else f"middle_block.{2 * int(m[2])}.{_renamed(m[3], _RESNET)}"]
    return [_renamed(name, _UNET_STEM)]


def locate_vae(part: Part, config: Mapping[str, Any]) -> Locate:
    """ldm counts the decoder's levels from the finest, diffusers from the coarsest."""
    levels = len(config["block_out_channels"])

    def ldm(name: str) -> list[str]:
        side, _, rest = name.partition(".")
        if side not in ("encoder", "decoder"):
            return [name]
        if m := _VAE_LEVEL.fullmatch(rest):
            level = int(m[2]) if m[1] == "down" else levels - 1 - int(m[2])
            inner = f"block.{m[4]}" if m[4] else "downsample" if m[1] == "down" else "upsample"
            rest = f"{m[1]}.{level}.{inner}.{m[5]}".replace("conv_shortcut", "nin_shortcut")
        elif m := re.fullmatch(r"mid_block\.resnets\.(\d)\.(.+)", rest):
            rest = f"mid.block_{int(m[1]) + 1}.{m[2]}"
        elif m := re.fullmatch(r"mid_block\.attentions\.0\.(.+)\.(weight|bias)", rest):
            return [f"{side}.mid.attn_1.{spelling}.{m[2]}" for spelling in (_VAE_ATTENTION[m[1]][0], m[1])]
        return [f"{side}.{rest.replace('conv_norm_out', 'norm_out')}"]

    return lambda name: [Piece(part.key(key)) for key in ldm(name)]


def locate_same(name: str) -> list[Piece]:
    """A diffusers UNet in a folder: the file's names are the module's."""
    return [Piece(name)]


def locate_diffusers_vae(name: str) -> list[Piece]:
    """Files of diffusers itself: its names, or those it used for the attention before 0.15."""
    m = re.fullmatch(r"(.*mid_block\.attentions\.0\.)(.+)\.(weight|bias)", name)
    older = [Piece(f"{m[1]}{_VAE_ATTENTION[m[2]][1]}.{m[3]}")] if m else []
    return [Piece(name), *older]


def locate_clip(part: Part | None = None) -> Locate:
    """transformers' own names, whatever version wrote the file and whatever version is installed here."""
    prefixes = ("",) if part is None else (part.prefix + "transformer.", part.prefix)

    def pieces(name: str) -> list[Piece]:
        bare = name.removeprefix("text_model.")
        return [Piece(prefix + n) for prefix in prefixes for n in (f"text_model.{bare}", bare)]

    return pieces


def locate_open_clip(part: Part) -> Locate:
    """OpenCLIP's names under `model.`: q, k and v in one tensor, the projection transposed."""

    def pieces(name: str) -> list[Piece]:
        bare = name.removeprefix("text_model.")
        if bare == "text_projection.weight":
            return [
                Piece(part.key("model.text_projection"), transposed=True),
                Piece(part.key("model.text_projection.weight")),
            ]
        if bare == "embeddings.token_embedding.weight":
            return [Piece(part.key("model.token_embedding.weight"))]
        if bare == "embeddings.position_embedding.weight":
            return [Piece(part.key("model.positional_embedding"))]
        if bare.startswith("final_layer_norm."):
            return [Piece(part.key("model.ln_final." + bare.rpartition(".")[2]))]
        m = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", bare)
        assert m, f"no key for {name}"
        block = f"model.transformer.resblocks.{m[1]}."
        if q := re.fullmatch(r"self_attn\.([qkv])_proj\.(weight|bias)", m[2]):
            return [Piece(part.key(f"{block}attn.in_proj_{q[2]}"), share=(Fraction("qkv".index(q[1]), 3), Fraction(1, 3)))]
        return [Piece(part.key(block + _renamed(m[2], _OPEN_CLIP)))]

    return pieces
