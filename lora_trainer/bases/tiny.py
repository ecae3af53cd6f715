"""What tests must know to make a tiny base of a family, in every layout people have; `families/<name>/tiny.py` holds TINY.

Numbers lie over those of the released configs: few blocks, heads as wide as the family's rules tell them from a file's header.
Random weights are drawn in the order of `parts`, so an order once chosen keeps golden losses as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from ..files.kinds import Part
from . import single_file
from .originals import Places, locate
from .weights import Locate

Numbers = Mapping[str, Any]
KINDS = ("fp32", "fp8", "fp8_scaled", "gguf", "all_in_one")
TINY_VAE: Numbers = {
    "block_out_channels": [32] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 1,
}  # fmt: skip
"""For AutoencoderKL."""
TINY_CLIP: Numbers = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 1}
TINY_T5: Numbers = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}


@dataclass(frozen=True)
class Encoder:
    """A text encoder and the tokenizer that stands beside it."""

    model: str
    """clip, t5, or a language model: a key of diffusion.llm_text.MODELS."""
    file: str
    """As ComfyUI's users call it, without its ending."""
    numbers: Numbers = field(default_factory=dict)
    """Of language models: `width` and `layers`."""
    inside: str = ""
    """Its name in all-in-one files, where that is not the file's."""
    in_files: Numbers = field(default_factory=dict)
    """What differs in single files."""
    pad: str = ""
    """The token that CLIP is padded with, if not the end mark."""
    tokenizer: str = ""
    """Its folder, where that is not `tokenizer` with the encoder's number."""
    tokenizer_class: str = ""
    """transformers', where it is not the usual one."""
    texts: tuple[str, ...] = ()
    """Of which each word shall be one token of a language model's tokenizer."""
    special: tuple[str, ...] = ()


def unchanged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state


def nothing(modules: dict[str, nn.Module]) -> None:
    pass


@dataclass(frozen=True)
class Tiny:
    """A tiny base: the numbers of its networks, and how its files are called and laid out."""

    pipeline: str
    """diffusers' class."""
    parts: Mapping[str, "Numbers | Encoder"]
    """transformer, vae and the text encoders, as diffusers names them, in the order in which they are drawn."""
    narrow: Numbers
    """What makes the released transformer small enough to be measured."""
    gguf: str
    """Architecture that GGUF files name."""
    release: str = ""
    """Of arch/, if it is not called as the family."""
    places: Callable[[Numbers], Places] = lambda config: Places()
    """Where single files have the transformer's weights, by its config; unsaid, as diffusers names them."""
    locate_vae: Callable[[Numbers], Locate] = lambda config: single_file.locate_vae(Part({}, ""), config)
    """The same for the VAE."""
    stored_vae: Callable[[dict[str, Tensor]], dict[str, Tensor]] = unchanged
    """The VAE's state as its file shapes it."""
    vae_file: str = "ae"
    vae_prefix: str = "vae."
    """In all-in-one files."""
    gguf_prefix: str = ""
    wide_in_scaled: tuple[str, ...] = ()
    """What people leave in 16 bits in scaled fp8, by its start."""
    finish: Callable[[dict[str, nn.Module]], None] = nothing
    """Draws what is no parameter, or wants other numbers than all parameters get."""
    scheduler: Numbers = field(default_factory=dict)
    index: Numbers = field(default_factory=dict)
    """More entries of model_index.json."""
    pipeline_parts: Callable[[Any], dict[str, Any]] = lambda folder: {}
    """Of a folder: parts of the pipeline that cannot be loaded without libraries that we do not need."""
    kinds: tuple[str, ...] = KINDS
    """Of single files; the first is the plain one."""
    training: Numbers = field(default_factory=lambda: {"peso_niveis": "cosmap"})
    """Options of `treino` that its golden losses depend on: of rectified flow, if nothing is said."""

    def locate(self, config: Numbers) -> Locate:
        return partial(locate, Part({}, ""), self.places(config))

    @property
    def encoders(self) -> dict[str, Encoder]:
        return {name: part for name, part in self.parts.items() if isinstance(part, Encoder)}

    def changed(self, part: str, numbers: Numbers) -> "Tiny":
        """The same but for some numbers of a network."""
        return replace(self, parts={**self.parts, part: {**cast(Numbers, self.parts[part]), **numbers}})
