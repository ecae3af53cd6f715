"""What families with a diffusion transformer share: one `transformer`, text encoders and VAE as they lie, captions as read.

A family adds what its parts are (`network`, `slots`, `fits`), what reads captions (`open_reader`) and what the transformer is
called with (`predict`). Latents are those of its VAE; packing into tokens is the family's.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from ..bases import architecture as _architecture
from ..bases.components import Networks
from ..bases.originals import Original, Places
from ..bases.parts import Slot, Transformer, open_parts
from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import ConfigError, SourceError, t
from ..files.sources import Source
from ..seam.family import Batch, BlockGroup, Example, Prepare
from ..seam.readers import TRANSFORMERS
from ..seam.slots import Slot as FileSlot
from . import prompts
from .captions import Reader
from .diffusion import DiffusionFamily


@dataclass(frozen=True)
class Fit:
    """A part's width (`entry` of its config, `times` over) must be the transformer's `wanted`, less the width of another part."""

    part: str
    entry: str
    wanted: str
    times: int = 1
    beside: tuple[str, str] | None = None
    """(part, entry of its config)."""


def targets(block: str, attention: str, mlp: str = "", modulation: str = "") -> dict[str, str]:
    """What `modelo.alvos_lora` may be: regular expressions of a block's path, and of layers inside it."""

    def inside(*layers: str) -> str:
        return rf"{block}\.(?:{'|'.join(filter(None, layers))})"

    both = inside(attention, mlp)
    presets = {"auto": inside(attention), "attention": inside(attention), "attention+mlp": both}
    return {**presets, "all": inside(attention, mlp, modulation)}


class TransformerFamily(DiffusionFamily):
    trained = "transformer"
    prediction_type: Literal["epsilon", "v_prediction", "flow"] = "flow"
    formats = TRANSFORMERS
    network: ClassVar[Transformer]
    slots: ClassVar[tuple[Slot, ...]]
    """Text encoders and VAE, as they lie in files."""
    fits: ClassVar[tuple[Fit, ...]]
    """Widths that tell parts of other models, given one by one."""
    masked: ClassVar[bool] = False
    """Whether prompts of differing length get a mask."""
    original: ClassVar[Original | None] = None
    """The layout of kohya files, where some matrices may be fused; None where layers are called as diffusers calls them."""
    text_width: ClassVar[str] = "joint_attention_dim"
    """The transformer's config entry for the width of prompt embeds."""
    pooled_width: ClassVar[str] = ""
    """That for the width of a pooled text; "" has none."""
    block_lists: ClassVar[Mapping[str, str]]
    """Name of a group -> the transformer's attribute that holds its blocks."""
    before_blocks: ClassVar[tuple[str, ...]] = ()
    """Large layers, or lists of them, that run once before all blocks: streamed as those are, never quantised."""
    after_blocks: ClassVar[tuple[str, ...]] = ()
    model_spec: str
    """Of metadata: modelspec.architecture without "/lora"."""
    base_version: str
    """Of metadata: kohya's ss_base_model_version."""
    tells_guidance: ClassVar[bool] = False
    """In metadata: what training told a model whose guidance is an input."""
    guided: bool = False
    """Guidance is an input."""
    reader: Reader
    tokens: int
    """Of the longest prompt."""

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        self.source, self.settings, self.components = source, settings, networks.components
        self.text_parts = tuple(name for name in networks.components if name.startswith("text_encoder"))
        self.schedule_config, self.notices = networks.scheduler, list(networks.notices)
        self.config = self.components["transformer"].config
        self.places = self.original.places_of(self.config) if self.original else Places()
        vae = self.components["vae"].config
        self.scaling_factor, self.shift_factor = float(vae.get("scaling_factor") or 1.0), float(vae.get("shift_factor") or 0.0)
        self.latent_facts = (self.scaling_factor, self.shift_factor)
        self._check_settings()
        self._check_widths()
        self.reader = self.open_reader(networks, tokens)
        self.tokenizer, self.tokens, self.token_limit = self.reader.tokenizer, self.reader.tokens, self.reader.limit

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "TransformerFamily":
        release, slots = cls.parts(source, settings)
        networks = open_parts(source, settings, release, cls.network, slots)
        return cls(source, settings, networks, max_caption_tokens)

    @classmethod
    def parts(cls, source: Source, settings: ModelConfig) -> tuple[str, Sequence[Slot]]:
        """The folder of arch/ that stands for the base, and its networks besides the transformer."""
        return cls.name, cls.slots

    @abstractmethod
    def open_reader(self, networks: Networks, tokens: int | None) -> Reader:
        """What reads captions; `tokens`: None is what is usual for the base."""

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
        for fit in self.fits:
            if fit.part not in self.components:
                continue
            has, wants = self.width_of(fit.part, fit.entry) * fit.times, int(self.config[fit.wanted])
            wants -= self.width_of(*fit.beside) if fit.beside else 0
            if has != wants:
                raise SourceError.said(
                    pt=f"{fit.part}: largura {has}, mas o transformador espera {wants}",
                    en=f"{fit.part}: width {has}, but the transformer wants {wants}",
                    hint_pt=f"o arquivo é de outro modelo; dê o de {self.title}",
                    hint_en=f"the file is of another model; give that of {self.title}",
                    where=self.components[fit.part].what,
                )

    def width_of(self, part: str, entry: str) -> int:
        config = self.components[part].config
        return int((config.get("text_config") or config)[entry])

    # -- captions

    def tokenizers(self) -> list[Any]:
        return self.reader.facts()

    def count_tokens(self, caption: str) -> int:
        return self.reader.count(caption)

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [self.reader.tokenize(caption) for caption in captions]

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        return self.reader.encode(model, batch)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Of prompts that differ in length."""
        return prompts.collate(examples)

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        model = super().load_model(device, dtype, with_text=with_text, prepare=prepare)
        if dtype is torch.float16:
            self.keep_in_range(model["transformer"])
        return model

    def keep_in_range(self, transformer: nn.Module) -> None:
        """For networks whose activations pass fp16; before adapters are put on it."""

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        return self.answer(cast(Any, model["transformer"]), x_t, timesteps, self.with_prompts(model, batch))

    @abstractmethod
    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """As `predict`; prompt embeds are in the batch."""

    def guidance(self, timesteps: Tensor, batch: Batch) -> Tensor | None:
        """(B,) float32, as drawing or training tells it; None where it is no input."""
        told = torch.full_like(timesteps, self.training_guidance, dtype=torch.float32)
        return batch.get("guidance", told) if self.guided else None

    def with_prompts(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """With prompt embeds, where the run encodes captions while it trains."""
        if "prompt_embeds" in batch:
            return batch
        encoded = self.encode_ids(model, batch)
        rows = [{name: value[row] for name, value in encoded.items()} for row in range(len(batch["latents"]))]
        return {**batch, **prompts.collate([prompts.trim(row) for row in rows])}

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        transformer: Any = model["transformer"]
        groups = [BlockGroup(name, list(getattr(transformer, path))) for name, path in self.block_lists.items()]
        before, after = (_layers(transformer, paths) for paths in (self.before_blocks, self.after_blocks))
        return [BlockGroup("before", before, exact=True), *groups, BlockGroup("after", after, exact=True)]

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        """Of the longest captions; a masked one beside another has its mask."""
        length, width = self.longest(), int(self.config[self.text_width])
        batch = {**self.bare_batch(batch_size, size), "prompt_embeds": torch.zeros(batch_size, length, width)}
        if self.masked and batch_size > 1:
            batch[prompts.MASK] = torch.ones(batch_size, length, dtype=torch.bool)
        if self.pooled_width:
            batch["pooled_embeds"] = torch.zeros(batch_size, int(self.config[self.pooled_width]))
        return batch

    def longest(self) -> int:
        """Tokens of the longest prompt, as the transformer is given it."""
        return self.tokens

    # -- output

    @property
    def width(self) -> int:
        """Of the transformer's tokens."""
        return int(self.config["attention_head_dim"]) * int(self.config["num_attention_heads"])

    def kohya_slots(self, path: str) -> FileSlot | None:
        """A layer's place in kohya files; None for what they cannot carry."""
        return self.places.slot(path.removeprefix("transformer."), self.width)

    def export_prefixes(self) -> dict[str, str]:
        return {"transformer": "lora_unet"}

    def metadata(self) -> dict[str, str]:
        guidance = {"ss_guidance_scale": str(self.training_guidance)} if self.tells_guidance else {}
        return {
            "modelspec.architecture": f"{self.model_spec}/lora",
            "modelspec.prediction_type": self.prediction_type,
            "ss_base_model_version": self.base_version,
            **guidance,
            "ss_sd_model_name": self.source.title(),
        }


def _layers(transformer: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    found = (transformer.get_submodule(path) for path in paths)
    return [layer for one in found for layer in (one if isinstance(one, nn.ModuleList) else [one])]
