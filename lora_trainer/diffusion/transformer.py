"""What families with a diffusion transformer share: rectified flow, one `transformer`, text encoders and VAE as they lie.

A family adds how captions become prompt embeds (`tokenize`, `encode_ids`) and what the transformer is called with
(`predict`). Latents are those of its VAE; packing into tokens is the family's.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..bases import architecture as _architecture
from ..bases import component
from ..bases.components import Networks
from ..bases.refusal import refusal
from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import ConfigError, SourceError, t
from ..files.sources import Source
from ..seam.family import Batch, BlockGroup, Example, Framing, Prepare
from . import clip_text, prompts
from . import vae as _vae
from .diffusion import DiffusionFamily


class TransformerFamily(DiffusionFamily):
    prediction_type = "flow"
    formats = ("diffusers", "kohya")
    masked: ClassVar[bool] = False
    """Whether prompts of differing length get a mask."""
    text_width: ClassVar[str] = "joint_attention_dim"
    """The transformer's config entry for the width of prompt embeds."""
    tokenizer: Any
    """Of the encoder that reads most of a caption."""
    tokens: int
    """Of the longest prompt."""
    text_parts: tuple[str, ...]
    """Text encoders, by their diffusers names."""
    block_lists: ClassVar[Mapping[str, str]]
    """Name of a group -> the transformer's attribute that holds its blocks."""
    before_blocks: ClassVar[tuple[str, ...]] = ()
    """Large layers, or lists of them, that run once before all blocks: streamed as those are, never quantised."""
    after_blocks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks) -> None:
        self.source, self.settings, self.components = source, settings, networks.components
        self.schedule_config, self.notices = networks.scheduler, list(networks.notices)
        vae = self.components["vae"].config
        self.scaling_factor, self.shift_factor = float(vae.get("scaling_factor") or 1.0), float(vae.get("shift_factor") or 0.0)
        self._check_settings()
        self._check_widths()

    @classmethod
    def refuse_others(cls, source: Source) -> None:
        if not cls.takes(source):
            raise refusal(source)

    @classmethod
    def shipped_architecture(cls) -> Path:
        return _architecture.shipped_folder(cls.name)

    @classmethod
    def count_parameters(cls, config: Mapping[str, Any]) -> int:
        return _architecture.count_parameters(config)

    def _check_settings(self) -> None:
        for option, usual in (("train_text_encoder", False), ("prediction_type", "auto"), ("clip_skip", 1)):
            if getattr(self.settings, option) != usual:
                name = shown("model", option)
                raise ConfigError(
                    t(pt=f"{name} não se aplica a {self.title}", en=f"{name} does not apply to {self.title}"),
                    t(pt="apague a chave", en="remove the key"),
                    name,
                )

    def _check_widths(self) -> None:
        """Parts given one by one may belong to different models."""
        for part, has, wants in self.widths():
            if has != wants:
                component = self.components[part]
                raise SourceError(
                    t(
                        pt=f"{part}: largura {has}, mas o transformador espera {wants}",
                        en=f"{part}: width {has}, but the transformer wants {wants}",
                    ),
                    t(
                        pt=f"o arquivo é de outro modelo; dê o de {self.title}",
                        en=f"the file is of another model; give that of {self.title}",
                    ),
                    component.what,
                )  # fmt: skip

    @abstractmethod
    def widths(self) -> list[tuple[str, int, int]]:
        """(part, its width, the width that the transformer wants) of every part that could be another model's."""

    @abstractmethod
    def tokenizers(self) -> list[Any]:
        """All that text embeds depend on besides the encoders."""

    def count_tokens(self, caption: str) -> int:
        return len(self.tokenizer(caption, add_special_tokens=False, verbose=False).input_ids)

    @abstractmethod
    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """What `tokenize` made, stacked -> prompt embeds, and `_prompts.MASK` (B, L) where padding is not to be attended to."""

    def architecture(self) -> str:
        return json.dumps({name: part.config for name, part in self.components.items()}, sort_keys=True, default=str)

    # -- caching phase

    def text_fingerprint(self) -> str:
        parts = [self.components[name].fingerprint() for name in self.text_parts]
        return hashlib.sha256(json.dumps([*parts, *self.tokenizers()]).encode()).hexdigest()

    def image_fingerprint(self) -> str:
        parts = [self.components["vae"].fingerprint(), self.scaling_factor, self.shift_factor]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def load_text_encoders(
        self, device: torch.device, dtype: torch.dtype, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        return component.load_all(self.components, self.text_parts, device, dtype, prepare)

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _vae.vae_dtype(dtype, self.components["vae"].config, upcast=True)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return self.components["vae"].load(device, self.vae_dtype(dtype))

    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]:
        encoded = clip_text.encode_captions(self.encode_ids, encoders, self.tokenize(captions))
        return [prompts.trim(example) for example in encoded]

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        encoded = _vae.encode(vae, pixels, self.scaling_factor, self.shift_factor)
        return [{"latents": latents.clone()} for latents in encoded]

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Of prompts that differ in length."""
        return prompts.collate(examples)

    # -- training

    def with_prompts(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """With prompt embeds, where the run encodes captions while it trains."""
        if "prompt_embeds" in batch:
            return batch
        encoded = self.encode_ids(model, batch)
        rows = [{name: value[row] for name, value in encoded.items()} for row in range(len(batch["latents"]))]
        return {**batch, **prompts.collate([prompts.trim(row) for row in rows])}

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        names = ["transformer", *(self.text_parts if with_text else ())]
        return component.load_all(self.components, names, device, dtype, prepare)

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        transformer: Any = model["transformer"]
        groups = [BlockGroup(name, list(getattr(transformer, path))) for name, path in self.block_lists.items()]
        before, after = (_layers(transformer, paths) for paths in (self.before_blocks, self.after_blocks))
        return [BlockGroup("before", before, exact=True), *groups, BlockGroup("after", after, exact=True)]

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        """Of the longest captions; a masked one beside another has its mask."""
        length, width = self.longest(), int(self.components["transformer"].config[self.text_width])
        mask = {prompts.MASK: torch.ones(batch_size, length, dtype=torch.bool)} if self.masked and batch_size > 1 else {}
        return {
            "latents": torch.zeros(self.latents_shape(batch_size, size)),
            "seeds": torch.zeros(batch_size, dtype=torch.int64),
            "weight": torch.ones(batch_size),
            "prompt_embeds": torch.zeros(batch_size, length, width),
            **mask,
        }

    def longest(self) -> int:
        """Tokens of the longest prompt, as the transformer is given it."""
        return self.tokens

    def latents_shape(self, batch_size: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(B, C, H, W) of pictures of `size` (width, height) pixels."""
        vae = self.components["vae"].config
        width, height = (side // _vae.factor(vae) for side in size)
        return batch_size, int(vae["latent_channels"]), height, width

    # -- previews

    def preview_conditions(self, size: tuple[int, int]) -> Example:
        return {}

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _vae.decode(vae, latents, self.scaling_factor, self.shift_factor)

    # -- output

    def export_prefixes(self) -> dict[str, str]:
        return {"transformer": "lora_unet"}


def _layers(transformer: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    found = (transformer.get_submodule(path) for path in paths)
    return [layer for one in found for layer in (one if isinstance(one, nn.ModuleList) else [one])]
