"""What sd15 and sdxl share: one UNet that predicts noise or velocity, CLIP text encoders that may be trained with it, a VAE."""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..bases.components import Networks, open_networks
from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import ConfigError, t
from ..files.sources import Source
from ..seam.family import Batch, BlockGroup, Example
from ..seam.readers import UNETS
from . import clip_text, prediction
from . import unet as _unet
from .diffusion import DiffusionFamily


class UNetFamily(DiffusionFamily):
    trained = "unet"
    formats = UNETS
    lora_targets: ClassVar[dict[str, str]] = _unet.LORA_TARGETS
    text_targets = _unet.TEXT_TARGETS
    usual_scaling: ClassVar[float]
    """Of latents, where the VAE's config does not say."""

    def __init__(
        self, source: Source, settings: ModelConfig, networks: Networks, chunks: Sequence[clip_text.Chunks]
    ) -> None:
        self.source, self.settings, self.chunks = source, settings, tuple(chunks)
        self.release = source.looks_like().name
        self.components = networks.components
        self.text_parts = tuple(part for part in networks.components if part.startswith("text_encoder"))
        self.token_limit = self.chunks[0].count * clip_text.CHUNK
        self.notices = list(networks.notices)
        """What the user should know, each a line in their language."""
        self.schedule_config = prediction.noise_schedule(source, networks.scheduler)
        self.prediction_type, notice = prediction.prediction_type(
            source, settings.prediction_type, networks.scheduler, self.release
        )
        self.notices += [notice] if notice else []
        self.scaling_factor = float(self.components["vae"].config.get("scaling_factor", self.usual_scaling))
        self.latent_facts = (self.scaling_factor,)

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "UNetFamily":
        release = source.looks_like().name
        networks = open_networks(source, settings, release)
        _check_clip_skip(settings.clip_skip, release, networks)
        texts = [part for part in networks.components if part.startswith("text_encoder")]
        tokens = max_caption_tokens
        chunks = [clip_text.open_chunks(source, settings, networks, release, part, tokens) for part in texts]
        return cls(source, settings, networks, chunks)

    # -- captions

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        names = [part.replace("text_encoder", "input_ids") for part in self.text_parts]
        return [
            {name: chunks.ids(caption) for name, chunks in zip(names, self.chunks, strict=True)} for caption in captions
        ]

    def count_tokens(self, caption: str) -> int:
        return len(self.chunks[0].tokens(caption))

    def truncate_report(self, caption: str) -> tuple[int, str]:
        """Number of tokens, and the text that does not fit."""
        return self.chunks[0].truncate_report(caption)

    # -- training

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        return _unet.block_groups(model)

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        if "prompt_embeds" not in batch:
            batch = {**batch, **self.encode_ids(model, batch)}
        unet = cast(Any, model["unet"])
        dtype = unet.conv_in.weight.dtype
        predicted: Tensor = unet(
            x_t.to(dtype), timesteps, batch["prompt_embeds"].to(dtype), added_cond_kwargs=self.added(batch, dtype)
        ).sample
        return predicted

    def added(self, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """What the UNet is told besides the caption's embeds, in diffusers' words."""
        return None

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        batch, count, length = self.bare_batch(batch_size, size), self.chunks[0].count, clip_text.CHUNK + 2
        if self.settings.train_text_encoder:
            ids = torch.zeros(batch_size, count, length, dtype=torch.int64)
            return batch | {part.replace("text_encoder", "input_ids"): ids.clone() for part in self.text_parts}
        texts = [self.components[part].config for part in self.text_parts]
        width = sum(int(text["hidden_size"]) for text in texts)
        embeds = {"prompt_embeds": torch.zeros(batch_size, count * length, width)}
        if len(texts) > 1:
            embeds["pooled_embeds"] = torch.zeros(batch_size, int(texts[-1]["projection_dim"]))
        return batch | embeds

    # -- output

    def metadata(self) -> dict[str, str]:
        velocity = self.prediction_type == "v_prediction"
        return {
            "modelspec.prediction_type": "v" if velocity else "epsilon",
            "ss_v2": str(self.release == "sd2"),
            "ss_v_parameterization": str(velocity),
            "ss_sd_model_name": self.source.title(),
        }


PENULTIMATE = {"sd2": "SD 2.x", "sdxl": "SDXL"}
"""Releases that always use CLIP's last layer but one, as people call them."""


def _check_clip_skip(clip_skip: int, release: str, networks: Networks) -> None:
    """ConfigError for layers that the text encoder does not have, or the base does not use."""
    most = int(networks.components["text_encoder"].config.get("num_hidden_layers", 12))
    reason = t(pt=f"o codificador de texto tem {most} camadas", en=f"the text encoder has {most} layers")
    if known := PENULTIMATE.get(release):
        most = 2
        reason = t(pt=f"o {known} usa sempre a penúltima camada", en=f"{known} always uses the penultimate layer")
    if clip_skip > most:
        raise ConfigError(
            t(pt=f"pular_clip: {clip_skip}, mas {reason}", en=f"clip_skip: {clip_skip}, but {reason}"),
            t(pt="retire a chave", en="remove the key"),
            shown("model", "clip_skip"),
        )
