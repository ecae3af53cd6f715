"""SDXL 1.0 and its shrunk kin (SSD-1B, …): one UNet, two text encoders, and the sizes of the picture as a condition.

Both encoders are read at their last but one layer, without the final norm; their states stand side by side. The pooled
text is the second one's projection (Podell et al. 2023, section 2.1). The six sizes are those of section 2.2, in
diffusers' order: original height and width, crop top and left, target height and width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...bases import tokenizers
from ...diffusion import clip_text
from ...diffusion.unet_family import UNetFamily
from ...seam.family import Batch, Example, Framing

PENULTIMATE = 2


class SDXL(UNetFamily):
    name = "sdxl"
    title = "SDXL"
    pipeline = "StableDiffusionXLPipeline"
    side_multiple = 32
    usual_scaling = 0.13025

    def tokenizers(self) -> list[Any]:
        return [f"{tokenizers.fingerprint(chunks.tokenizer)}{chunks.count}" for chunks in self.chunks]

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Differentiable: both input_ids (B, chunks, 77) -> prompt_embeds (B, L, D), pooled_embeds (B, P)."""
        first, _ = clip_text.hidden_states(model["text_encoder"], batch["input_ids"], PENULTIMATE, normalised=False)
        second, pooled = clip_text.hidden_states(
            model["text_encoder_2"], batch["input_ids_2"], PENULTIMATE, normalised=False
        )
        assert pooled is not None, "text_encoder_2 has a projection"
        return {"prompt_embeds": torch.cat([first, second], dim=-1), "pooled_embeds": pooled}

    def conditions(self, framing: Framing) -> Example:
        return {"time_ids": time_ids(framing)}

    def added(self, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor] | None:
        return {"text_embeds": batch["pooled_embeds"].to(dtype), "time_ids": batch["time_ids"].to(torch.float32)}

    def export_prefixes(self) -> dict[str, str]:
        return {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "ss_base_model_version": "sdxl_base_v1-0",
            **super().metadata(),
        }


def time_ids(framing: Framing) -> Tensor:
    """(6,): height before width, top before left."""
    numbers = [*framing.original[::-1], *framing.crop[::-1], *framing.target[::-1]]
    return torch.tensor(numbers, dtype=torch.float32)


FAMILY = SDXL
