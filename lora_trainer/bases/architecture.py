"""The shape of each network: shipped as data for the released models, else derived from a single file's tensors.

Depths, widths and vocabulary are read from the header. What a header cannot tell, the number of attention heads and of
norm groups, follows the family's rule (SD 1.x: 8 heads; SD 2.x, SDXL and CLIP: 64 channels a head; 32 norm groups) and
is said in a notice when the widths are not those of the released models. `modelo.arquitetura` overrides all of it.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from math import gcd
from pathlib import Path
from typing import Any, Literal

from ..config.names import shown
from ..errors import SourceError, t
from ..files import arch
from ..files.kinds import Part
from ..files.sources import Source

HEAD_CHANNELS = 64
NORM_GROUPS = 32
_PROJECTIONS = ("conditioner.embedders.1.model.text_projection", "conditioner.embedders.1.model.text_projection.weight")
Config = dict[str, Any]


def shipped(release: str, component: str) -> Config:
    """A config of arch/, e.g. shipped("sdxl", "text_encoder_2")."""
    config = Source(shipped_folder(release), "folder", release).config(component)
    assert config is not None, f"{release} ships no {component}"
    return config


def shipped_folder(release: str) -> Path:
    """Config files of a release that ships with its family."""
    found = arch.folder(release)
    assert found is not None, f"no family ships {release}"
    return found


def count_parameters(config: Mapping[str, Any]) -> int:
    """Of the diffusers network that a config.json describes, built without weights; 0 where diffusers has no such class."""
    import diffusers
    import torch

    network = getattr(diffusers, str(config["_class_name"]), None)
    if network is None:
        return 0
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network.from_config(dict(config)).parameters())


def given(folder: str | None, component: str) -> Config | None:
    """A component's config from the folder of `modelo.arquitetura`; None without the folder or the file."""
    if folder is None:
        return None
    where = shown("model", "architecture")
    if not Path(folder).is_dir():
        raise SourceError.said(
            pt=f"{folder} não é uma pasta",
            en=f"{folder} is not a folder",
            hint_pt="dê uma pasta no formato do diffusers, com unet/config.json etc.",
            hint_en="give a folder in diffusers' layout, with unet/config.json and so on",
            where=where,
        )
    return Source(Path(folder), "folder", where).config(component)


def unusual(derived: Mapping[str, Any], standard: Mapping[str, Any]) -> bool:
    """Whether widths differ from the released model's, so that heads and groups are a guess. Depths do not matter."""
    keys = ("block_out_channels", "hidden_size")
    return any(tuple_of(derived[key]) != tuple_of(standard[key]) for key in keys if key in standard)


def tuple_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def guess_notice(guessed: Mapping[str, Mapping[str, Any]]) -> str:
    """One line on what was assumed of the networks of an unusual width (component -> config)."""
    pt, en = [], []
    for name, config in guessed.items():
        if "hidden_size" in config:
            pt.append(f"{name}: {config['num_attention_heads']} cabeças de atenção")
            en.append(f"{name}: {config['num_attention_heads']} attention heads")
            continue
        heads = config.get("attention_head_dim")
        pt.append(
            f"{name}: {config['norm_num_groups']} grupos de normalização" + (f", cabeças {heads}" if heads else "")
        )
        en.append(f"{name}: {config['norm_num_groups']} norm groups" + (f", heads {heads}" if heads else ""))
    return t(
        pt=f"larguras fora do comum; o arquivo não diz tudo, e supus {'; '.join(pt)}. "
        "Se não for isso, indique em modelo.arquitetura a pasta com os config.json",
        en=f"unusual widths; the file does not tell all, so this was assumed: {'; '.join(en)}. "
        "If that is wrong, give the folder with the config.json files in model.architecture",
    )


def norm_groups(channels: Sequence[int]) -> int:
    """32, or the largest divisor of all widths below it."""
    common = reduce(gcd, channels)
    return max(n for n in range(1, NORM_GROUPS + 1) if common % n == 0)


# -- UNet


def derive_unet(part: Part, standard: Config, what: str) -> Config:
    """The config of a UNet in the original layout, starting from the released model's."""
    down, up = _levels(part, "input_blocks", 1), _levels(part, "output_blocks", 0)
    layers = {len(level) for level in down} | {len(level) - 1 for level in up}
    if len(layers) != 1 or len(down) != len(up):
        raise SourceError.said(
            pt=f"a UNet deste arquivo tem níveis de {sorted(layers)} camadas, que não sei montar",
            en=f"the UNet of this file has levels of {sorted(layers)} layers, which I cannot build",
            hint_pt="use a pasta do diffusers deste modelo",
            hint_en="use this model's diffusers folder",
            where=what,
        )
    widths = [level[0][0] for level in down]
    depths = [[depth for _, depth in level] for level in down]
    up_depths = [[depth for _, depth in level] for level in up]
    config = dict(standard)
    config |= {
        "in_channels": _shape(part, "input_blocks.0.0.weight")[1],
        "out_channels": _shape(part, "out.2.weight")[0],
        "block_out_channels": widths,
        "layers_per_block": layers.pop(),
        "down_block_types": ["CrossAttnDownBlock2D" if any(d) else "DownBlock2D" for d in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if any(d) else "UpBlock2D" for d in up_depths],
        "norm_num_groups": norm_groups(widths),
    }
    config |= _transformer_depths(part, depths, up_depths)
    config |= _attention(part, widths, standard)
    return config | (_additional(part, what) if "addition_embed_type" in standard else {})


def _levels(part: Part, row: Literal["input_blocks", "output_blocks"], first: int) -> list[list[tuple[int, int]]]:
    """(width, transformer depth) of each layer, cut into levels where the resolution changes."""
    levels: list[list[tuple[int, int]]] = [[]]
    number = first
    while True:
        start = f"{row}.{number}"
        number += 1
        if f"{start}.0.op.weight" in part:
            levels.append([])
            continue
        shape = part.shape(f"{start}.0.in_layers.2.weight")
        if shape is None:
            return [level for level in levels if level]
        levels[-1].append((shape[0], part.count(start + ".1.transformer_blocks.{}.norm1.weight")))
        if f"{start}.1.conv.weight" in part or f"{start}.2.conv.weight" in part:
            levels.append([])


def _transformer_depths(part: Part, down: list[list[int]], up: list[list[int]]) -> Config:
    """Depths as one number a level where they are even (as in SDXL), else layer by layer (as in SSD-1B)."""
    middle = part.count("middle_block.1.transformer_blocks.{}.norm1.weight")
    config: Config = {}
    if not middle and "middle_block.2.in_layers.0.weight" not in part:
        config["mid_block_type"] = "UNetMidBlock2D"
    flat = [level[0] or 1 for level in down]
    even = all(len(set(level)) == 1 for level in (*down, *up)) and [level[0] or 1 for level in up] == flat[::-1]
    if even and middle in (0, flat[-1]):
        return config | {"transformer_layers_per_block": flat}
    if even and middle:  # a last level without attention, as in SD 1.x, takes the number for the middle block's
        flat[-1] = middle if not any(down[-1]) else flat[-1]
    return config | {
        "transformer_layers_per_block": [level if any(level) else flat[i] for i, level in enumerate(down)],
        "reverse_transformer_layers_per_block": [level if any(level) else 1 for level in up],
    }


def _attention(part: Part, widths: list[int], standard: Config) -> Config:
    """Width of the text it attends to, heads, and SDXL's additional embedding."""
    config: Config = {}
    row = ["middle_block.1", *(f"input_blocks.{n}.1" for n in range(1, 5 * len(widths)))]
    first = next((start for start in row if f"{start}.proj_in.weight" in part), None)
    if first:
        config["cross_attention_dim"] = _shape(part, f"{first}.transformer_blocks.0.attn2.to_k.weight")[1]
        config["use_linear_projection"] = len(_shape(part, f"{first}.proj_in.weight")) == 2
    if isinstance(standard["attention_head_dim"], list):  # diffusers' name for the number of heads
        config["attention_head_dim"] = [max(1, width // HEAD_CHANNELS) for width in widths]
    return config


def _additional(part: Part, what: str) -> Config:
    """SDXL: the pooled text and six sizes go through label_emb; the text's width is that of the second encoder."""
    width = _shape(part, "label_emb.0.0.weight")[1]
    projection = next((info.shape for key, info in part.header.items() if key.endswith(_PROJECTIONS)), (0,))
    each, rest = divmod(width - projection[-1], 6)
    if rest or each < 1:
        raise SourceError.said(
            pt=f"a UNet espera {width} números adicionais, que não combinam com o codificador de texto 2",
            en=f"the UNet expects {width} additional numbers, which do not suit text encoder 2",
            hint_pt="o arquivo mistura partes de modelos diferentes",
            hint_en="the file mixes parts of different models",
            where=what,
        )
    return {"projection_class_embeddings_input_dim": width, "addition_time_embed_dim": each}


def _shape(part: Part, name: str) -> tuple[int, ...]:
    shape = part.shape(name)
    if shape is None:
        raise SourceError(
            t(pt=f"falta o tensor {part.key(name)}", en=f"the tensor {part.key(name)} is missing"),
            t(pt="o arquivo está incompleto: baixe-o de novo", en="the file is incomplete: download it again"),
        )
    return shape


# -- VAE and text encoders


def derive_vae(part: Part, standard: Config) -> Config:
    """A VAE file in the original layout."""
    return standard | _vae_sizes(part, "encoder.down.{}.block.{}.conv1.weight")


def derive_diffusers_vae(part: Part, standard: Config) -> Config:
    """A VAE file with diffusers' names, which comes without its config."""
    conv = "encoder.down_blocks.{}.resnets.{}.conv1.weight"
    if conv.format(0, 0) not in part:
        where = shown("model", "vae")
        raise SourceError.said(pt="não há um VAE neste arquivo", en="there is no VAE in this file", where=where)
    return standard | _vae_sizes(part, conv)


def _vae_sizes(part: Part, conv: str) -> Config:
    """`conv`: the first convolution of a level's layer."""
    levels = part.count(conv.format("{}", 0))
    widths = [_shape(part, conv.format(level, 0))[0] for level in range(levels)]
    return {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "layers_per_block": part.count(conv.format(0, "{}")),
        "latent_channels": _shape(part, "decoder.conv_in.weight")[1],
        "in_channels": _shape(part, "encoder.conv_in.weight")[1],
        "norm_num_groups": norm_groups(widths),
        "use_quant_conv": "quant_conv.weight" in part,
        "use_post_quant_conv": "post_quant_conv.weight" in part,
    }


def derive_clip(part: Part, standard: Config) -> Config:
    """A CLIP text encoder with transformers' names, as in SD 1.x and SDXL's first, or in a file of its own."""
    starts = ("transformer.text_model.", "transformer.", "text_model.", "")
    start = next((s for s in starts if f"{s}embeddings.token_embedding.weight" in part), starts[0])
    return _clip(standard, _shape(part, f"{start}embeddings.token_embedding.weight")) | {
        "max_position_embeddings": _shape(part, f"{start}embeddings.position_embedding.weight")[0],
        "num_hidden_layers": part.count(start + "encoder.layers.{}.layer_norm1.weight"),
        "intermediate_size": _shape(part, f"{start}encoder.layers.0.mlp.fc1.weight")[0],
    }


def derive_open_clip(part: Part, standard: Config, *, most_layers: int | None = None) -> Config:
    """An OpenCLIP text encoder; `most_layers` leaves out SD2's last one, whose output the model never saw."""
    layers = part.count("model.transformer.resblocks.{}.ln_1.weight")
    projection = part.shape("model.text_projection") or part.shape("model.text_projection.weight")
    return _clip(standard, _shape(part, "model.token_embedding.weight")) | {
        "max_position_embeddings": _shape(part, "model.positional_embedding")[0],
        "num_hidden_layers": min(layers, most_layers or layers),
        "intermediate_size": _shape(part, "model.transformer.resblocks.0.mlp.c_fc.weight")[0],
        "projection_dim": projection[-1] if projection else standard["projection_dim"],
    }


def _clip(standard: Config, embedding: tuple[int, ...]) -> Config:
    """Heads by the rule; start and end tokens are the last two of every CLIP vocabulary."""
    vocabulary, width = embedding
    return standard | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_attention_heads": max(1, width // HEAD_CHANNELS),
        "bos_token_id": vocabulary - 2,
        "eos_token_id": vocabulary - 1,
        "pad_token_id": 0 if standard["pad_token_id"] == 0 else vocabulary - 1,
    }
