"""Stable Diffusion 1.x and 2.x: one UNet, one CLIP text encoder. 2.x differs by data (arch/), its OpenCLIP and its
layer.

SD 1.x reads CLIP's last layer, or an earlier one (`pular_clip`) through the last norm; SD 2.x always the last but one
of OpenCLIP's, which its files hold as the last.
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


class SD15(DiffusionFamily):
    name = "sd15"
    title = "Stable Diffusion 1.x/2.x"
    signature = SIGNATURE
    formats = ("kohya", "diffusers")
    side_multiple = 64
    lora_targets: ClassVar[dict[str, str]] = _unet.LORA_TARGETS
    text_targets = _unet.TEXT_TARGETS

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, chunks: clip_text.Chunks) -> None:
        self.source, self.settings, self.chunks = source, settings, chunks
        self.release = source.looks_like().name
        self.token_limit = chunks.count * clip_text.CHUNK
        self.components = networks.components
        self.notices = list(networks.notices)
        """What the user should know, each a line in their language."""
        self.schedule_config = prediction.noise_schedule(source, networks.scheduler)
        self.prediction_type, notice = prediction.prediction_type(
            source, settings.prediction_type, networks.scheduler, self.release
        )
        self.notices += [notice] if notice else []
        self.scaling_factor = float(self.components["vae"].config.get("scaling_factor", 0.18215))

    @classmethod
    def shipped_architecture(cls) -> Path:
        return _architecture.shipped_folder("sd1")

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "SD15":
        if not cls.takes(source):
            raise refusal(source)
        release = source.looks_like().name
        networks = open_networks(source, settings, release)
        encoder = networks.components["text_encoder"].config
        _check_clip_skip(settings.clip_skip, release, int(encoder.get("num_hidden_layers", 12)))
        standard = _architecture.shipped(release, "tokenizer")
        tokenizer = tokenizers.find_tokenizer(source, settings.tokenizer, "tokenizer", standard)
        chunks = clip_text.make_chunks(tokenizer, max_caption_tokens, int(encoder.get("vocab_size", 49408)), source.what)
        return cls(source, settings, networks, chunks)

    def architecture(self) -> str:
        return json.dumps({name: part.config for name, part in self.components.items()}, sort_keys=True, default=str)

    # -- caching phase

    def text_fingerprint(self) -> str:
        parts = [
            self.components["text_encoder"].fingerprint(),
            tokenizers.fingerprint(self.chunks.tokenizer),
            self.chunks.count,
            self._clip_skip(),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def image_fingerprint(self) -> str:
        parts = [self.components["vae"].fingerprint(), self.scaling_factor]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def load_text_encoders(
        self, device: torch.device, dtype: torch.dtype, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        return component.load_all(self.components, ["text_encoder"], device, dtype, prepare)

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The precision that the VAE really runs in when `dtype` is asked."""
        return _vae.vae_dtype(dtype, self.components["vae"].config, upcast=False)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return self.components["vae"].load(device, self.vae_dtype(dtype))

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [{"input_ids": self.chunks.ids(caption)} for caption in captions]

    def count_tokens(self, caption: str) -> int:
        return len(self.chunks.tokens(caption))

    def truncate_report(self, caption: str) -> tuple[int, str]:
        """Number of tokens, and the text that does not fit."""
        return self.chunks.truncate_report(caption)

    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]:
        return clip_text.encode_captions(self.encode_ids, encoders, self.tokenize(captions))

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Differentiable: input_ids (B, chunks, 77) -> prompt_embeds (B, L, D)."""
        states, _ = clip_text.hidden_states(model["text_encoder"], batch["input_ids"], self._clip_skip(), normalised=True)
        return {"prompt_embeds": states}

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        return [{"latents": latents.clone()} for latents in _vae.encode(vae, pixels, self.scaling_factor)]

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        names = ["unet", "text_encoder"] if with_text else ["unet"]
        return component.load_all(self.components, names, device, dtype, prepare)

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        return _unet.block_groups(model)

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        if "prompt_embeds" not in batch:
            batch = {**batch, **self.encode_ids(model, batch)}
        unet = cast(Any, model["unet"])
        dtype = unet.conv_in.weight.dtype
        predicted: Tensor = unet(x_t.to(dtype), timesteps, batch["prompt_embeds"].to(dtype)).sample
        return predicted

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        width, height = (side // _vae.factor(self.components["vae"].config) for side in size)
        channels = int(self.components["unet"].config.get("in_channels", 4))
        batch = {
            "latents": torch.zeros(batch_size, channels, height, width),
            "seeds": torch.zeros(batch_size, dtype=torch.int64),
            "weight": torch.ones(batch_size),
        }
        length = self.chunks.count * (clip_text.CHUNK + 2)
        if self.settings.train_text_encoder:
            return batch | {"input_ids": torch.zeros(batch_size, self.chunks.count, clip_text.CHUNK + 2, dtype=torch.int64)}
        text_width = int(self.components["text_encoder"].config["hidden_size"])
        return batch | {"prompt_embeds": torch.zeros(batch_size, length, text_width)}

    # -- previews

    def preview_conditions(self, size: tuple[int, int]) -> Example:
        return {}

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _vae.decode(vae, latents, self.scaling_factor)

    # -- output

    def export_prefixes(self) -> dict[str, str]:
        return {"unet": "lora_unet", "text_encoder": "lora_te"}

    def metadata(self) -> dict[str, str]:
        velocity = self.prediction_type == "v_prediction"
        v2 = "stable-diffusion-v2-768-v" if velocity else "stable-diffusion-v2-512"
        return {
            "modelspec.architecture": f"{'stable-diffusion-v1' if self.release == 'sd1' else v2}/lora",
            "modelspec.prediction_type": "v" if velocity else "epsilon",
            "ss_base_model_version": "sd_v1" if self.release == "sd1" else "sd_v2",
            "ss_v2": str(self.release == "sd2"),
            "ss_v_parameterization": str(velocity),
            "ss_clip_skip": str(self.settings.clip_skip),
            "ss_sd_model_name": self.source.title(),
        }

    def _clip_skip(self) -> int:
        return self.settings.clip_skip if self.release == "sd1" else 1


def _check_clip_skip(clip_skip: int, release: str, layers: int) -> None:
    most = layers if release == "sd1" else 2
    if clip_skip > most:
        reason = (
            t(pt=f"o codificador de texto tem {layers} camadas", en=f"the text encoder has {layers} layers")
            if release == "sd1"
            else t(pt="o SD 2.x usa sempre a penúltima camada", en="SD 2.x always uses the penultimate layer")
        )
        raise ConfigError(
            t(pt=f"pular_clip: {clip_skip}, mas {reason}", en=f"clip_skip: {clip_skip}, but {reason}"),
            t(pt="retire a chave", en="remove the key"),
            shown("model", "clip_skip"),
        )


FAMILY = SD15
