"""FLUX.2 (Black Forest Labs 2025): klein 4B and 9B, base and distilled, and dev.

A token is one latent of 128 channels (vae.py); positions have four axes, of which pictures use rows and columns and
texts the last. The text is three layers of a language model side by side, of full length and without a mask, so its padding
is part of what the model was trained on: Qwen3 for klein, Mistral Small for dev. dev is distilled: guidance is an input,
and training tells it `treino.orientacao`. All as diffusers' Flux2KleinPipeline and Flux2Pipeline do it. Noise levels are
shifted by the scheduler's line when training, as the model was, and further when drawing (empirical_mu).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...bases import parts as _parts
from ...bases.components import Networks
from ...bases.parts import Transformer
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.slots import Slot
from . import names, vae, variant
from .captions import ThreeLayers

TOKENS = 512
DISTILLED_STEPS = 4
_DOUBLE, _SINGLE = r"transformer_blocks\.\d+", r"single_transformer_blocks\.\d+"


def build(config: Mapping[str, Any]) -> nn.Module:
    from diffusers import Flux2Transformer2DModel  # not in every version that the rest works with

    return cast(nn.Module, Flux2Transformer2DModel.from_config(dict(config)))


class Flux2(TransformerFamily):
    name = "flux2"
    title = "FLUX.2"
    pipeline = "Flux2Pipeline"
    loader_kinds = ("lora", "lokr")
    base_version = "flux2"
    tells_guidance = True
    side_multiple = 16
    usual_guidance = 4.0
    patch = 1
    sizes: ClassVar = {5.0: "flux2", 10.0: "flux2_klein_9b", 40.0: "flux2_dev"}
    network = Transformer(build, names.derive)
    original = names.FLUX2
    fits = (
        Fit("text_encoder", "hidden_size", "joint_attention_dim", 3),
        Fit("vae", "latent_channels", "in_channels", vae.CELL),
    )
    latents = vae.LATENTS
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    before_blocks = (
        "double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation", "context_embedder",
    )  # fmt: skip
    after_blocks = ("norm_out",)
    lora_targets: ClassVar = targets(
        "transformer",
        rf"{_DOUBLE}\.attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|{_SINGLE}\.attn\.(?:to_qkv_mlp_proj|to_out)",
        rf"{_DOUBLE}\.ff(?:_context)?\.linear_(?:in|out)",
    )

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        self.release = variant.find_release(source, settings)
        super().__init__(source, settings, networks, tokens)
        self.model_spec = f"flux-2-{self.release.variant}"
        self.guided = bool(self.config.get("guidance_embeds", True))
        few_steps = None if self.guided else variant.told_distilled(source)
        self.distilled = self.guided or bool(few_steps)
        if few_steps:
            self.usual_steps = DISTILLED_STEPS
            self.notices.append(variant.distilled_notice())
        elif few_steps is None and not self.guided and (notice := variant.unsure_notice(source)):
            self.notices.append(notice)

    @classmethod
    def parts(cls, source: Source, settings: ModelConfig) -> tuple[str, Sequence[_parts.Slot]]:
        release = variant.find_release(source, settings)
        encoder = llm_text.language_slot("text_encoder", release.model, release.encoder, release.layers, (release.prefix,))
        return release.arch, (encoder, vae.VAE)

    def open_reader(self, networks: Networks, tokens: int | None) -> ThreeLayers:
        tokenizer = variant.find_tokenizer(self.source, self.settings, self.release)
        return ThreeLayers(tokenizer, tokens or TOKENS, self.release)

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, (height, width) = transformer.x_embedder.weight.dtype, x_t.shape[-2:]
        predicted: Tensor = transformer(
            hidden_states=x_t.to(dtype).flatten(2).transpose(1, 2),
            timestep=timesteps.to(dtype) / 1000,
            guidance=self.guidance(timesteps, batch),
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            txt_ids=text_positions(batch["prompt_embeds"].shape[1], x_t.device),
            img_ids=positions(height, width, x_t.device),
        ).sample
        return predicted.transpose(1, 2).unflatten(2, (height, width))

    def sampling_mu(self, steps: int, shape: torch.Size) -> float:
        return empirical_mu(shape[-2] * shape[-1], steps)

    def kohya_slots(self, path: str) -> Slot | None:
        """None outside the blocks, of which diffusers' reader drops a part."""
        return super().kohya_slots(path) if "_blocks." in path else None


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
