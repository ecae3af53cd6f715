"""FLUX.1 (Black Forest Labs 2024): dev, schnell and their fine-tunes.

2 x 2 latent pixels are a token; its place in the picture is a rotary position, the text's is zero. CLIP-L gives the pooled
text, T5-XXL the sequence, of full length and without a mask, so its padding is part of what the model was trained on. dev
is distilled: guidance is an input, and training tells it `treino.orientacao` (1 by default). All as diffusers' FluxPipeline
does it.
"""

from typing import Any, ClassVar

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from ...bases import tokenizers
from ...bases.components import Networks
from ...bases.parts import CLIP_L, T5_XXL, VAE, Transformer
from ...config.schema import ModelConfig
from ...diffusion import clip_text
from ...diffusion.captions import ClipAndT5
from ...diffusion.packing import PATCH, pack, positions, unpack
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.readers import KOHYA_WITHOUT_DIFFUSERS, TRANSFORMERS
from ...seam.slots import Slot
from . import names
from .variant import refuse_controls, schnell_notice

DEV_TOKENS, SCHNELL_TOKENS = 512, 256
SCHNELL_STEPS = 4
BLOCK = r"transformer\.(?:single_)?transformer_blocks\.\d+"
ATTENTION = r"attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
MLP = r"ff(?:_context)?\.net\.(?:0\.proj|2)|proj_mlp|proj_out"


class Flux(TransformerFamily):
    name = "flux"
    title = "FLUX.1"
    pipeline = "FluxPipeline"
    base_version = "flux1"
    side_multiple = 16
    usual_guidance = 3.5
    distilled = True
    tells_guidance = True
    patch = PATCH
    pooled_width = "pooled_projection_dim"
    network = Transformer(FluxTransformer2DModel.from_config, names.derive)
    original = names.FLUX
    slots = (CLIP_L, T5_XXL, VAE)
    fits = (
        Fit("text_encoder", "hidden_size", "pooled_projection_dim"),
        Fit("text_encoder_2", "d_model", "joint_attention_dim"),
        Fit("vae", "latent_channels", "in_channels", PATCH**2),
    )
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    lora_targets: ClassVar = targets(BLOCK, ATTENTION, MLP, r"norm1?(?:_context)?\.linear")

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        refuse_controls(networks, source)
        self.guided = bool(networks.components["transformer"].config.get("guidance_embeds"))
        super().__init__(source, settings, networks, tokens)
        self.model_spec = f"flux-1-{'dev' if self.guided else 'schnell'}"
        self.formats = TRANSFORMERS if self.width == names.RELEASED_WIDTH else KOHYA_WITHOUT_DIFFUSERS
        if not self.guided:
            self.usual_steps = SCHNELL_STEPS
            self.notices.append(schnell_notice())

    def open_reader(self, networks: Networks, tokens: int | None) -> ClipAndT5:
        clip = clip_text.open_chunks(self.source, self.settings, networks, "flux", "text_encoder", None)
        t5 = tokenizers.find_t5_tokenizer(self.source, self.settings.tokenizer, "tokenizer_2")
        return ClipAndT5(t5, tokens or (DEV_TOKENS if self.guided else SCHNELL_TOKENS), clip)

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, (height, width) = transformer.x_embedder.weight.dtype, x_t.shape[-2:]
        predicted: Tensor = transformer(
            hidden_states=pack(x_t.to(dtype)),
            timestep=timesteps.to(dtype) / 1000,
            guidance=self.guidance(timesteps, batch),
            pooled_projections=batch["pooled_embeds"].to(dtype),
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3, device=x_t.device),
            img_ids=positions(height // PATCH, width // PATCH, x_t.device),
        ).sample
        return unpack(predicted, height, width)

    def kohya_slots(self, path: str) -> Slot | None:
        slot = super().kohya_slots(path)
        return slot if slot is not None and not slot.swapped else None  # diffusers' reader exchanges no halves


FAMILY = Flux
