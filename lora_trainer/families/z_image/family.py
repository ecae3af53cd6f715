"""Z-Image (Tongyi-MAI 2025): the base, Turbo, and fine-tunes of either.

One stream of tokens, the picture's before the caption's, each filled up to a multiple of 32 with a learnt token; a caption's
place is counted along the first rotary axis, and the picture stands behind it. Qwen3-4B reads the caption inside its chat
template, and its last layer but one is what the transformer sees, without padding. Time runs from noise (0) to picture (1)
and the answer points the same way, so both are turned round. All as diffusers' ZImagePipeline does it; noise levels in
training as the authors drew them (arXiv 2511.22699, section 4.3): logit-normal, shifted for the picture's size.
"""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...bases import llm_tokenizers
from ...bases.components import Networks
from ...bases.parts import VAE, Transformer
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.captions import LanguageModel
from ...diffusion.prompts import MASK
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...engine.host import is_fake
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.slots import Slot, flat
from . import names
from .network import build, keep_in_range
from .variant import TURBO_STEPS, refuse_omni, turbo_notice, variant_of

TOKENS, PATCH = 512, 2
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LAYER = -2
QWEN3 = llm_text.language_slot(
    "text_encoder", "qwen3", "Qwen3-4B (qwen_3_4b.safetensors)", (LAYER,),
    ("text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_4b."),
)  # fmt: skip
BLOCK = r"transformer\.(?:layers|noise_refiner|context_refiner)\.\d+"


class ZImage(TransformerFamily):
    name = "z_image"
    title = "Z-Image"
    pipeline = "ZImagePipeline"
    loader_kinds = ("lora", "lokr")
    base_version = "zimage"
    masked = True
    text_width = "cap_feat_dim"
    side_multiple = 16
    usual_guidance = 5.0
    patch = PATCH
    training_shift = "resolution"
    network = Transformer(build, names.derive)
    original = names.Z_IMAGE
    slots = (QWEN3, VAE)
    fits = (Fit("text_encoder", "hidden_size", "cap_feat_dim"), Fit("vae", "latent_channels", "in_channels"))
    block_lists: ClassVar = {name: name for name in ("noise_refiner", "context_refiner", "layers")}
    lora_targets: ClassVar = targets(
        BLOCK, r"attention\.(?:to_[qkv]|to_out\.0)", r"feed_forward\.w[123]", r"adaLN_modulation\.0"
    )

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        refuse_omni(networks, source)
        super().__init__(source, settings, networks, tokens)
        self.turbo = (variant := variant_of(source, settings)).turbo
        self.model_spec = f"z-image{'-turbo' if self.turbo else ''}"
        if variant.shift:
            self.schedule_config = {**self.schedule_config, "shift": variant.shift}
        if self.turbo:
            self.usual_guidance, self.usual_steps = 1.0, TURBO_STEPS
            self.notices += [] if settings.training_lora else [turbo_notice()]
        self.notices += [variant.notice] if variant.notice else []

    def open_reader(self, networks: Networks, tokens: int | None) -> LanguageModel:
        find = llm_tokenizers.find_llm_tokenizer
        tokenizer = find(self.source, self.settings.tokenizer, "tokenizer", llm_tokenizers.QWEN3_PLACES, "Qwen3")
        return LanguageModel(tokenizer, tokens or TOKENS, (TEMPLATE,), LAYER, around=(TEMPLATE.format(""),))

    def keep_in_range(self, transformer: nn.Module) -> None:
        keep_in_range([block for blocks in self.block_lists for block in getattr(transformer, blocks)])

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype = transformer.all_x_embedder[names.PATCH_KEY].weight.dtype
        pictures = list(x_t.to(dtype)[:, :, None].unbind())  # each (C, frames, H, W)
        answers = transformer(pictures, (1000 - timesteps) / 1000, captions(batch, dtype), return_dict=False)[0]
        return -torch.stack(answers).squeeze(2)

    def kohya_slots(self, path: str) -> Slot | None:
        """None outside the blocks, where diffusers does not find the dots again."""
        if not re.match(BLOCK, path):
            return None
        layer = path.removeprefix("transformer.")
        return self.places.slot(layer, int(self.config["dim"])) or Slot(flat(layer))


def captions(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """Prompt embeds (L, D), each as long as it is."""
    embeds, mask = batch["prompt_embeds"].to(dtype), batch.get(MASK)
    if mask is None:
        return list(embeds.unbind())
    longest = embeds.shape[1]
    fakes = [longest, *[max(1, longest - 32)] * (len(embeds) - 1)]  # of unlike length, as the plan must take them to be
    lengths = fakes if is_fake(mask) else mask.sum(1).tolist()
    return [one[:length] for one, length in zip(embeds, lengths, strict=True)]


FAMILY = ZImage
