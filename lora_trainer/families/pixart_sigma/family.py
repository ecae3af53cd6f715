"""PixArt-Sigma (Chen et al. 2024, arXiv 2403.04692): the 512 and 1024 releases and their fine-tunes.

A small transformer of the older kind: it predicts noise (epsilon), and beside it a variance that was learnt with it and that no
sampler of today asks for: only the first half of its answer is trained. T5-XXL reads captions in lower case, its padding
masked; they are looked at through an attention of their own. Latents are those of SDXL's VAE. All as diffusers'
PixArtSigmaPipeline does it, but for its cleaning of captions (URLs, punctuation), and previews, which DDIM draws.
"""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from ...bases import tokenizers
from ...bases.components import Networks
from ...bases.parts import T5_XXL, VAE, Transformer
from ...config.schema import ModelConfig
from ...diffusion.captions import T5
from ...diffusion.prompts import MASK
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...files.sources import Source
from ...seam.family import Batch, Example
from ...seam.readers import Readers
from . import names
from .network import build, sizes

TOKENS = 300
FORMATS: Readers = {"diffusers": ("ComfyUI",), "kohya": ("ComfyUI",)}
"""diffusers' pipeline loads no LoRA."""


class LowerCase(T5):
    def tokenize(self, caption: str) -> Example:
        return super().tokenize(caption.lower().strip())


class PixArtSigma(TransformerFamily):
    name = "pixart_sigma"
    title = "PixArt-Sigma"
    pipeline = "PixArtSigmaPipeline"
    formats = FORMATS
    model_spec, base_version = "pixart-sigma", "pixart_sigma"
    prediction_type = "epsilon"
    masked = True
    text_width = "caption_channels"
    side_multiple = 32
    usual_guidance = 4.5
    network = Transformer(build, names.derive)
    slots = (replace(T5_XXL, part="text_encoder"), replace(VAE, title="VAE (sdxl_vae.safetensors)"))
    fits = (Fit("text_encoder", "d_model", "caption_channels"), Fit("vae", "latent_channels", "in_channels"))
    block_lists: ClassVar = {"blocks": "transformer_blocks"}
    lora_targets: ClassVar = targets(
        r"transformer\.transformer_blocks\.\d+", r"attn[12]\.(?:to_[qkv]|to_out\.0)", r"ff\.net\.(?:0\.proj|2)"
    )

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        super().__init__(source, settings, networks, tokens)
        self.places = names.places(int(self.config["num_layers"]))

    def open_reader(self, networks: Networks, tokens: int | None) -> LowerCase:
        t5 = tokenizers.find_t5_tokenizer(self.source, self.settings.tokenizer, "tokenizer")
        return LowerCase(t5, tokens or TOKENS)

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        latents: Tensor = x_t.to(transformer.pos_embed.proj.weight.dtype)
        answer: Tensor = transformer(
            hidden_states=latents,
            encoder_hidden_states=batch["prompt_embeds"].to(latents),
            timestep=timesteps,
            added_cond_kwargs=sizes(latents) if transformer.use_additional_conditions else None,
            encoder_attention_mask=batch.get(MASK),
        ).sample
        return answer[:, : x_t.shape[1]]


FAMILY = PixArtSigma
