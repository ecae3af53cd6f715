"""The seam between the one training loop and the many model families.

A family is one folder, found by its name; it holds everything that differs between families and nothing that does not.
A trained model is an `nn.ModuleDict` of parts named as diffusers names them (`unet`, `transformer`, `text_encoder`, …), so
that the module path of an adapter is already its key in a diffusers file.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..config.names import shown
from ..config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from ..errors import ConfigError, t
from ..files import arch
from ..files.kinds import family_of, signatures
from ..files.sources import Source
from .readers import Readers
from .slots import Slots

Example = dict[str, Tensor]
"""CPU tensors of one example, without a batch dimension; what the cache stores."""

Batch = dict[str, Tensor]
"""Examples stacked: every tensor's first dimension is B. `seeds` (B,) int64 fixes each example's noise and timestep,
`weight` (B,) its share in the loss; both are always there."""


@dataclass(frozen=True)
class BlockGroup:
    """A run of repeated layers that memory techniques may treat one by one."""

    name: str
    blocks: list[nn.Module]
    exact: bool = False
    """Quantisers leave them alone: what few weights decide too much, such as modulations for all blocks."""


@dataclass(frozen=True)
class Framing:
    """How an image was fitted into its bucket: sizes as (width, height), crop offset as (left, top), in pixels."""

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]


@dataclass(frozen=True)
class Sampling:
    """How previews are drawn; `size` is (width, height) in pixels, `chunk` the images drawn at once."""

    size: tuple[int, int]
    steps: int = 25
    guidance: float = 7.0
    seed: int = 0
    chunk: int = 1


Prepare = Callable[[nn.ModuleDict], None]


class Family(ABC):
    """Built by `open`, which reads headers and configs only; weights are read by the load_ methods."""

    source: Source
    notices: list[str]
    """What the user should know about the base, each a line in their language."""

    name: ClassVar[str]
    learns_from: ClassVar[Literal["images", "texts"]]
    """The run's modality: data, previews and files (run/run.py)."""
    title: ClassVar[str]
    """For people: "Stable Diffusion 1.x/2.x"."""
    formats: Readers
    """Layouts of its files, the usual one first -> the programs that read them."""
    pipeline: ClassVar[str] = ""
    """diffusers' class for the family's usual base. A base that names its own comes first: its loader proves the files."""
    loader_kinds: ClassVar[tuple[str, ...]] = ("lora",)
    """Kinds of adapter that its loader takes in the diffusers layout (diffusers 0.42)."""
    usual_release: ClassVar[str] = ""
    """Its folder of arch/, where that is not called as the family."""
    sizes: ClassVar[dict[float, str]] = {}
    """Bases of up to so many billion parameters -> the shape that stands for them in the presets (modelo.arquitetura)."""
    text_targets: ClassVar[str] = ""
    """Regular expression of the text encoders' adapted layers, over paths such as `text_encoder.…`; "" has none."""
    kohya_slots: Slots | None = None
    """Where modules lie in kohya files, if some of them are fused there (layouts/fused.py)."""
    lora_targets: ClassVar[dict[str, str]]
    """Preset (attention, attention+mlp, all) -> regular expression over module paths such as `unet.mid_block.…`."""
    @classmethod
    def takes(cls, source: Source) -> bool:
        """Whether the source is one of the family's bases, told by header or config.json alone."""
        return family_of(source.looks_like()) == cls.name

    @classmethod
    def shipped_architecture(cls) -> Path:
        """A folder of config files that stands for the family's usual base, for planning without one."""
        found = arch.folder(cls.usual_release or cls.name)
        assert found is not None, f"{cls.name} ships no such release"
        return found

    @classmethod
    @abstractmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "Family":
        """Read the architecture of a base that `takes` has accepted; raises SourceError for variants that cannot be trained.

        `max_caption_tokens`: None is what is usual for the base.
        """

    @classmethod
    def count_parameters(cls, config: Mapping[str, Any]) -> int:
        """Of the trained network that a config.json of diffusers describes; 0 where that cannot be told."""
        return 0

    @classmethod
    def chosen_tokens(cls, asked: int | str) -> int | None:
        """`dados.maximo_tokens` as `open` takes it; raises ConfigError for numbers of other families."""
        lengths = signatures()[cls.name].caption_tokens
        if asked != "auto" and asked not in lengths:
            name, listed = shown("data", "max_caption_tokens"), ", ".join(map(str, lengths))
            raise ConfigError(
                t(pt=f"{asked} não serve para {cls.title}", en=f"{asked} does not suit {cls.title}"),
                t(pt=f"use auto ou {listed}", en=f"use auto or {listed}"),
                name,
            )
        return None if asked == "auto" else int(asked)

    @classmethod
    def chosen_formats(cls, asked: Sequence[str]) -> tuple[str, ...]:
        """`saida.formatos` with `auto` replaced; raises ConfigError for formats of other families."""
        wrong = [name for name in asked if name not in ("auto", *cls.formats)]
        if wrong:
            raise ConfigError.said(
                pt=f"{wrong[0]} não é um formato de {cls.title}",
                en=f"{wrong[0]} is not a format of {cls.title}",
                hint_pt=f"use {', '.join(cls.formats)}",
                hint_en=f"use {', '.join(cls.formats)}",
                where=shown("output", "formats"),
            )
        usual = next(iter(cls.formats))
        return tuple(dict.fromkeys(usual if name == "auto" else name for name in asked))

    @abstractmethod
    def configure(self, training: TrainingConfig, data: DataConfig) -> None:
        """Take what the loss depends on. Called once, before the first loss; raises ConfigError."""

    @abstractmethod
    def architecture(self) -> str:
        """Changes with the shape of any network; not with weights."""

    @abstractmethod
    def largest(self, config: Config) -> tuple[int, int]:
        """Size of the largest example that the config allows, as example_batch takes it."""

    @abstractmethod
    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of the largest network, in this dtype: what a run without a card holds in RAM at once."""

    # -- training
    @abstractmethod
    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        """The frozen model, without adapters; on device "meta" the same modules without weights.

        `prepare` changes the modules on meta, before any weight is read, so that a base quantised or streamed is never
        held whole in 16 bits.
        """

    @abstractmethod
    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]: ...

    @abstractmethod
    def num_terms(self, batch: Batch) -> int:
        """How many loss terms the batch holds: images, or label tokens."""

    @abstractmethod
    def loss(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        """The SUM of the loss terms: float32, shape (). Noise comes from `batch["seeds"]` alone."""

    def loss_facts(self, mean: float) -> dict[str, float]:
        """What people of the field also call a mean loss, for the metrics: perplexity."""
        return {}

    @abstractmethod
    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        """Zeros shaped as a worst-case batch, for the simulation; `size` as (width, height) in pixels, or (tokens, 1)."""

    # -- output
    @abstractmethod
    def probe(self, model: nn.ModuleDict) -> Tensor:
        """A small forward pass on fixed random input: tells whether two adapters do the same."""

    @abstractmethod
    def export_prefixes(self) -> dict[str, str]:
        """Part -> kohya prefix: {"unet": "lora_unet", "text_encoder": "lora_te"}."""

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """modelspec.architecture, ss_base_model_version and the like."""


class ImageFamily(Family):
    """A family that learns from images and captions, which are encoded ahead, and draws images."""

    learns_from = "images"
    side_multiple: ClassVar[int]
    """Image sides must be multiples of this many pixels."""
    usual_guidance: float = 7.0
    """Of previews."""
    usual_steps: int = 25
    token_limit: int = 75
    """Caption tokens that count."""

    def largest(self, config: Config) -> tuple[int, int]:
        return config.data.resolution

    # -- caching phase
    @abstractmethod
    def text_fingerprint(self) -> str:
        """Changes whenever encode_text's result would."""

    @abstractmethod
    def image_fingerprint(self) -> str:
        """Changes whenever encode_image's result would."""

    @abstractmethod
    def load_text_encoders(
        self, device: torch.device, dtype: torch.dtype, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        """All that encode_text needs; `prepare` as in load_model."""

    @abstractmethod
    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The precision that the VAE really runs in when `dtype` is asked."""

    @abstractmethod
    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module: ...

    @abstractmethod
    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        """Token ids, for runs that encode captions during training."""

    @abstractmethod
    def count_tokens(self, caption: str) -> int:
        """Caption tokens without start, end and padding."""

    @abstractmethod
    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]: ...

    @abstractmethod
    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        """Pixels (B, 3, H, W) in [-1, 1] -> latents (C, H/8, W/8) and what else the model wants to know of each image.

        Whole or in tiles, as the VAE is set.
        """

    # -- previews
    @abstractmethod
    def preview_conditions(self, size: tuple[int, int]) -> Example:
        """What the model wants to know of an image to draw besides its prompt; size as (width, height) in pixels."""

    @abstractmethod
    def sample(
        self, model: nn.ModuleDict, positive: Sequence[Example], negative: Example, sampling: Sampling
    ) -> Tensor:
        """Clean latents (N, C, h, w) for N encoded prompts, on the model's device. Touches no global random state."""

    @abstractmethod
    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) as encode_image made them -> pixels (B, 3, H, W) in [-1, 1], float32.

        Whole or in tiles, as the VAE is set.
        """
