"""FLUX.2 (Black Forest Labs 2025): klein 4B and 9B, base and distilled, and dev.

A token is one latent of 128 channels (_flux2_vae.py); positions have four axes, of which pictures use rows and columns and
texts the last. The text is three layers of a language model side by side, of full length and without a mask, so its padding
is part of what the model was trained on: Qwen3 for klein, Mistral Small for dev. dev is distilled: guidance is an input,
and training tells it `treino.orientacao`. All as diffusers' Flux2KleinPipeline and Flux2Pipeline do it. Noise levels are
shifted by the scheduler's line when training, as the model was, and further when drawing (empirical_mu).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.parts import Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.transformer import TransformerFamily
from ...files.sources import Source
from ...seam.family import Batch, Example, Framing
from ...seam.slots import Slot, flat
from . import names
from . import vae as _flux2_vae
from . import variant as releases
from .signature import SIGNATURE

TOKENS = 512
DISTILLED_STEPS = 4

_DOUBLE, _SINGLE = r"transformer\.transformer_blocks\.\d+", r"transformer\.single_transformer_blocks\.\d+"
_ATTENTION = (
    rf"{_DOUBLE}\.attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|{_SINGLE}\.attn\.(?:to_qkv_mlp_proj|to_out)"
)
_MLP = rf"{_DOUBLE}\.ff(?:_context)?\.linear_(?:in|out)"


class Flux2(TransformerFamily):
    name = "flux2"
    title = "FLUX.2"
    signature = SIGNATURE
    side_multiple = 16
    usual_guidance = 4.0
    lora_loader = "Flux2LoraLoaderMixin"
    patch = 1
    sizes: ClassVar = {5.0: "flux2", 10.0: "flux2_klein_9b", 40.0: "flux2_dev"}
    text_parts = ("text_encoder",)
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    before_blocks = (
        "double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation", "context_embedder",
    )  # fmt: skip
    after_blocks = ("norm_out",)
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": _ATTENTION,
        "attention": _ATTENTION,
        "attention+mlp": f"{_ATTENTION}|{_MLP}",
        "all": f"{_ATTENTION}|{_MLP}",
    }

    def __init__(
        self, source: Source, settings: ModelConfig, networks: Networks, release: releases.Release, tokenizer: Any, tokens: int
    ) -> None:
        self.release, self.tokenizer, self.tokens = release, tokenizer, tokens
        super().__init__(source, settings, networks)
        config = self.components["transformer"].config
        self.guided = bool(config.get("guidance_embeds", True))
        self.width = int(config["attention_head_dim"]) * int(config["num_attention_heads"])
        self.kohya_slots = self._kohya_slot
        self.token_limit = max(0, tokens - len(self._ids("")))
        few_steps = None if self.guided else releases.told_distilled(source)
        self.distilled = self.guided or bool(few_steps)
        if few_steps:
            self.usual_steps = DISTILLED_STEPS
            self.notices.append(releases.distilled_notice())
        elif few_steps is None and not self.guided and (notice := releases.unsure_notice(source)):
            self.notices.append(notice)

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "Flux2":
        cls.refuse_others(source)
        release = releases.find_release(source, settings)
        encoder = llm_text.language_slot("text_encoder", release.model, release.encoder, release.layers, (release.prefix,))
        transformer = Transformer(_build, names.derive)
        networks = open_parts(source, settings, release.arch, transformer, (encoder, _flux2_vae.VAE))
        tokenizer = releases.find_tokenizer(source, settings, release)
        return cls(source, settings, networks, release, tokenizer, max_caption_tokens or TOKENS)

    def widths(self) -> list[tuple[str, int, int]]:
        config = {name: component.config for name, component in self.components.items()}
        text, transformer = llm_text.text_config(config["text_encoder"]), config["transformer"]
        return [
            ("text_encoder", int(text["hidden_size"]) * len(self.release.layers), int(transformer["joint_attention_dim"])),
            ("vae", int(config["vae"]["latent_channels"]) * _flux2_vae.CELL, int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.tokenizer), self.tokens, self.release.template, self.release.layers]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [self._padded(self._ids(caption)[: self.tokens]) for caption in captions]

    def _ids(self, caption: str) -> list[int]:
        """With the chat's words around it; `[IMG]` would stand for a picture."""
        caption = caption.replace("[IMG]", "") if self.release.pads_left else caption
        text = self.release.template.format(caption)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _padded(self, ids: list[int]) -> Example:
        pad = self.tokenizer.pad_token_id
        pad = self.tokenizer.convert_tokens_to_ids(self.release.pad) if pad is None else pad
        example = llm_text.padded(ids, self.tokens, int(pad))
        turn = self.tokens - len(ids) if self.release.pads_left else 0
        return {name: value.roll(turn) for name, value in example.items()}

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        encoder, ids, mask = model["text_encoder"], batch["input_ids"], batch["attention_mask"]
        return {"prompt_embeds": torch.cat(llm_text.hidden_states(encoder, ids, mask, self.release.layers), -1)}

    # -- images

    def latents_shape(self, batch_size: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        batch, channels, height, width = super().latents_shape(batch_size, size)
        return batch, channels * _flux2_vae.CELL, height // _flux2_vae.PATCH, width // _flux2_vae.PATCH

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        return [{"latents": latents.clone()} for latents in _flux2_vae.encode(vae, pixels)]

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _flux2_vae.decode(vae, latents)

    # -- training

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
        dtype, (height, width) = transformer.x_embedder.weight.dtype, x_t.shape[-2:]
        guidance = batch.get("guidance", torch.full_like(timesteps, self.training_guidance, dtype=torch.float32))
        predicted: Tensor = transformer(
            hidden_states=x_t.to(dtype).flatten(2).transpose(1, 2),
            timestep=timesteps.to(dtype) / 1000,
            guidance=guidance if self.guided else None,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            txt_ids=text_positions(batch["prompt_embeds"].shape[1], x_t.device),
            img_ids=positions(height, width, x_t.device),
        ).sample
        return predicted.transpose(1, 2).unflatten(2, (height, width))

    def sampling_mu(self, steps: int, shape: torch.Size) -> float:
        return empirical_mu(shape[-2] * shape[-1], steps)

    # -- output

    def _kohya_slot(self, path: str) -> Slot | None:
        found = names.original(path.removeprefix("transformer."), self.width)
        if found is None or "_blocks." not in found.name:  # what lies outside the blocks, diffusers' reader drops in part
            return None
        return Slot(flat(found.name), found.slot, found.rows)

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": f"flux-2-{self.release.variant}/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "flux2",
            "ss_guidance_scale": str(self.training_guidance),
            "ss_sd_model_name": self.source.title(),
        }


def _build(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import Flux2Transformer2DModel  # not in every version that the rest works with

    return cast(nn.Module, Flux2Transformer2DModel.from_config(dict(config)))


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows · columns, 4): nothing, row, column, nothing."""
    row = torch.arange(rows, device=device)[:, None].expand(rows, columns)
    column = torch.arange(columns, device=device)[None, :].expand(rows, columns)
    zero = torch.zeros_like(row)
    return torch.stack([zero, row, column, zero], -1).reshape(-1, 4)


def text_positions(length: int, device: torch.device) -> Tensor:
    """(length, 4): the last axis counts tokens."""
    return torch.nn.functional.pad(torch.arange(length, device=device)[:, None], (3, 0))


def empirical_mu(tokens: int, steps: int) -> float:
    """log of the shift as Black Forest Labs draw: lines for 10 and for 200 steps, and between them by the steps."""
    of_10, of_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    return of_200 if tokens > 4300 else of_200 + (steps - 200) * (of_200 - of_10) / 190


FAMILY = Flux2
