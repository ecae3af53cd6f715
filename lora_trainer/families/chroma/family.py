"""Chroma (lodestones 2025): Chroma1-HD, Chroma1-Base and fine-tunes of them, made from FLUX.1 schnell.

Blocks, packing, positions and VAE are FLUX's. T5-XXL alone reads captions, its padding masked; of the padding the transformer
sees one token and no more, so captions are kept as long as they are, and one token. All modulations come from one small
network that knows the timestep only, and guidance is classifier-free. As diffusers' ChromaPipeline does it, but for its mask:
that one adds 1 to the scores of real tokens instead of hiding the others (diffusers issue 13619).
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...bases import tokenizers
from ...bases.components import Networks
from ...bases.parts import T5_XXL, VAE, Transformer
from ...config.schema import ModelConfig
from ...diffusion.captions import T5
from ...diffusion.packing import PATCH, pack, positions, unpack
from ...diffusion.prompts import MASK
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.readers import KOHYA_WITHOUT_DIFFUSERS, TRANSFORMERS
from ..flux import names
from ..flux.family import ATTENTION, BLOCK, MLP
from .network import build

TOKENS = 512


class Chroma(TransformerFamily):
    name = "chroma"
    title = "Chroma"
    pipeline = "ChromaPipeline"
    model_spec = base_version = "chroma"
    masked = True
    side_multiple = 16
    usual_guidance = 5.0
    patch = PATCH
    timestep_sampling = "parabola"
    training_shift = 1.0
    network = Transformer(build, names.derive)
    original = names.CHROMA
    slots = (replace(T5_XXL, part="text_encoder"), VAE)
    fits = (Fit("text_encoder", "d_model", "joint_attention_dim"), Fit("vae", "latent_channels", "in_channels", PATCH**2))
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    before_blocks = ("distilled_guidance_layer.layers",)
    """The network of all modulations, which its users leave in 16 bits too."""
    lora_targets: ClassVar = targets(BLOCK, ATTENTION, MLP)

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        super().__init__(source, settings, networks, tokens)
        self.formats = TRANSFORMERS if self.width == names.RELEASED_WIDTH else KOHYA_WITHOUT_DIFFUSERS

    def open_reader(self, networks: Networks, tokens: int | None) -> T5:
        t5 = tokenizers.find_t5_tokenizer(self.source, self.settings.tokenizer, "tokenizer")
        return T5(t5, tokens or TOKENS, padding=1)

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, (height, width) = transformer.x_embedder.weight.dtype, x_t.shape[-2:]
        tokens, mask = pack(x_t.to(dtype)), batch.get(MASK)
        predicted: Tensor = transformer(
            hidden_states=tokens,
            timestep=timesteps.to(dtype) / 1000,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3, device=x_t.device),
            img_ids=positions(height // PATCH, width // PATCH, x_t.device),
            attention_mask=None if mask is None else torch.cat([mask, mask.new_ones(tokens.shape[:2])], 1),
        ).sample
        return unpack(predicted, height, width)


FAMILY = Chroma
