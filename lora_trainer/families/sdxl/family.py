"""SDXL 1.0 and its shrunk kin (SSD-1B, …): one UNet, two text encoders, and the sizes of the picture as a condition.

Both encoders are read at their last but one layer, without the final norm; their states stand side by side. The pooled
text is the second one's projection (Podell et al. 2023, section 2.1). The six sizes are those of section 2.2, in
diffusers' order: original height and width, crop top and left, target height and width.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...bases import architecture as _architecture
from ...bases import component, tokenizers
from ...bases.components import Networks, open_networks
from ...bases.refusal import refusal
from ...config.names import shown
from ...config.schema import ModelConfig
from ...diffusion import clip_text, prediction
from ...diffusion import unet as _unet
from ...diffusion import vae as _vae
from ...diffusion.diffusion import DiffusionFamily
from ...errors import ConfigError, t
from ...files.sources import Source
from ...seam.family import Batch, BlockGroup, Example, Framing, Prepare
from .signature import SIGNATURE

TEXT_PARTS = ("text_encoder", "text_encoder_2")
PENULTIMATE = 2


class SDXL(DiffusionFamily):
    name = "sdxl"
    title = "SDXL"
    signature = SIGNATURE
    formats = ("kohya", "diffusers")
    side_multiple = 32
    lora_targets: ClassVar[dict[str, str]] = _unet.LORA_TARGETS
    text_targets = _unet.TEXT_TARGETS

    def __init__(
        self, source: Source, settings: ModelConfig, networks: Networks, chunks: Sequence[clip_text.Chunks]
    ) -> None:
        self.source, self.settings, self.chunks = source, settings, tuple(chunks)
        self.components = networks.components
        self.token_limit = self.chunks[0].count * clip_text.CHUNK
        self.notices = list(networks.notices)
        """What the user should know, each a line in their language."""
        self.schedule_config = prediction.noise_schedule(source, networks.scheduler)
        self.prediction_type, notice = prediction.prediction_type(
            source, settings.prediction_type, networks.scheduler, "sdxl"
        )
        self.notices += [notice] if notice else []
        self.scaling_factor = float(self.components["vae"].config.get("scaling_factor", 0.13025))

    @classmethod
    def shipped_architecture(cls) -> Path:
        return _architecture.shipped_folder("sdxl")

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "SDXL":
        if not cls.takes(source):
            raise refusal(source)
        if settings.clip_skip > PENULTIMATE:
            raise ConfigError(
                t(
                    pt=f"pular_clip: {settings.clip_skip}, mas o SDXL usa sempre a penúltima camada",
                    en=f"clip_skip: {settings.clip_skip}, but SDXL always uses the penultimate layer",
                ),
                t(pt="retire a chave", en="remove the key"),
                shown("model", "clip_skip"),
            )
        networks = open_networks(source, settings, "sdxl")
        chunks = []
        for part in TEXT_PARTS:
            name = part.replace("text_encoder", "tokenizer")
            standard = _architecture.shipped("sdxl", name)
            tokenizer = tokenizers.find_tokenizer(source, settings.tokenizer, name, standard)
            vocabulary = int(networks.components[part].config.get("vocab_size", 49408))
            chunks.append(clip_text.make_chunks(tokenizer, max_caption_tokens, vocabulary, source.what))
        return cls(source, settings, networks, chunks)

    def architecture(self) -> str:
        return json.dumps({name: part.config for name, part in self.components.items()}, sort_keys=True, default=str)

    # -- caching phase

    def text_fingerprint(self) -> str:
        parts = [self.components[name].fingerprint() for name in TEXT_PARTS]
        parts += [f"{tokenizers.fingerprint(chunks.tokenizer)}{chunks.count}" for chunks in self.chunks]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def image_fingerprint(self) -> str:
        parts = [self.components["vae"].fingerprint(), self.scaling_factor]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def load_text_encoders(
        self, device: torch.device, dtype: torch.dtype, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        return component.load_all(self.components, TEXT_PARTS, device, dtype, prepare)

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The precision that the VAE really runs in when `dtype` is asked: never fp16, unless its config was mended."""
        return _vae.vae_dtype(dtype, self.components["vae"].config, upcast=True)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return self.components["vae"].load(device, self.vae_dtype(dtype))

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        first, second = self.chunks
        return [{"input_ids": first.ids(caption), "input_ids_2": second.ids(caption)} for caption in captions]

    def count_tokens(self, caption: str) -> int:
        return len(self.chunks[0].tokens(caption))

    def truncate_report(self, caption: str) -> tuple[int, str]:
        """Number of tokens, and the text that does not fit."""
        return self.chunks[0].truncate_report(caption)

    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]:
        return clip_text.encode_captions(self.encode_ids, encoders, self.tokenize(captions))

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Differentiable: both input_ids (B, chunks, 77) -> prompt_embeds (B, L, D), pooled_embeds (B, P)."""
        first, _ = clip_text.hidden_states(model["text_encoder"], batch["input_ids"], PENULTIMATE, normalised=False)
        second, pooled = clip_text.hidden_states(
            model["text_encoder_2"], batch["input_ids_2"], PENULTIMATE, normalised=False
        )
        assert pooled is not None, "text_encoder_2 has a projection"
        return {"prompt_embeds": torch.cat([first, second], dim=-1), "pooled_embeds": pooled}

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        latents = _vae.encode(vae, pixels, self.scaling_factor)
        return [
            {"latents": x.clone(), "time_ids": time_ids(framing)} for x, framing in zip(latents, framings, strict=True)
        ]

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        names = ["unet", *TEXT_PARTS] if with_text else ["unet"]
        return component.load_all(self.components, names, device, dtype, prepare)

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        return _unet.block_groups(model)

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        if "prompt_embeds" not in batch:
            batch = {**batch, **self.encode_ids(model, batch)}
        unet = cast(Any, model["unet"])
        dtype = unet.conv_in.weight.dtype
        condition = {"text_embeds": batch["pooled_embeds"].to(dtype), "time_ids": batch["time_ids"].to(torch.float32)}
        predicted: Tensor = unet(
            x_t.to(dtype), timesteps, batch["prompt_embeds"].to(dtype), added_cond_kwargs=condition
        ).sample
        return predicted

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        width, height = (side // _vae.factor(self.components["vae"].config) for side in size)
        channels = int(self.components["unet"].config.get("in_channels", 4))
        batch = {
            "latents": torch.zeros(batch_size, channels, height, width),
            "time_ids": torch.zeros(batch_size, 6),
            "seeds": torch.zeros(batch_size, dtype=torch.int64),
            "weight": torch.ones(batch_size),
        }
        count = self.chunks[0].count
        if self.settings.train_text_encoder:
            ids = torch.zeros(batch_size, count, clip_text.CHUNK + 2, dtype=torch.int64)
            return batch | {"input_ids": ids, "input_ids_2": ids.clone()}
        text_width = sum(int(self.components[name].config["hidden_size"]) for name in TEXT_PARTS)
        pooled_width = int(self.components["text_encoder_2"].config["projection_dim"])
        return batch | {
            "prompt_embeds": torch.zeros(batch_size, count * (clip_text.CHUNK + 2), text_width),
            "pooled_embeds": torch.zeros(batch_size, pooled_width),
        }

    # -- previews

    def preview_conditions(self, size: tuple[int, int]) -> Example:
        return {"time_ids": time_ids(Framing(original=size, crop=(0, 0), target=size))}

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _vae.decode(vae, latents, self.scaling_factor)

    # -- output

    def export_prefixes(self) -> dict[str, str]:
        return {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}

    def metadata(self) -> dict[str, str]:
        velocity = self.prediction_type == "v_prediction"
        return {
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "modelspec.prediction_type": "v" if velocity else "epsilon",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_v2": "False",
            "ss_v_parameterization": str(velocity),
            "ss_sd_model_name": self.source.title(),
        }


def time_ids(framing: Framing) -> Tensor:
    """(6,): height before width, top before left."""
    numbers = [*framing.original[::-1], *framing.crop[::-1], *framing.target[::-1]]
    return torch.tensor(numbers, dtype=torch.float32)


FAMILY = SDXL
