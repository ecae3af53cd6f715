"""Stable Diffusion 1.x and 2.x: one UNet, one CLIP text encoder. 2.x differs by data (arch/), its OpenCLIP and its
layer.

SD 1.x reads CLIP's last layer, or an earlier one (`pular_clip`) through the last norm; SD 2.x always the last but one
of OpenCLIP's, which its files hold as the last.
"""

from typing import Any

from torch import nn

from ...bases import tokenizers
from ...diffusion import clip_text
from ...diffusion.unet_family import UNetFamily
from ...seam.family import Batch


class SD15(UNetFamily):
    name = "sd15"
    title = "Stable Diffusion 1.x/2.x"
    usual_release = "sd1"
    pipeline = "StableDiffusionPipeline"
    side_multiple = 64
    upcast_vae = False
    usual_scaling = 0.18215

    @property
    def layer(self) -> int:
        """Of CLIP's, counted from the end."""
        return self.settings.clip_skip if self.release == "sd1" else 1

    def tokenizers(self) -> list[Any]:
        [chunks] = self.chunks
        return [tokenizers.fingerprint(chunks.tokenizer), chunks.count, self.layer]

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Differentiable: input_ids (B, chunks, 77) -> prompt_embeds (B, L, D)."""
        states, _ = clip_text.hidden_states(model["text_encoder"], batch["input_ids"], self.layer, normalised=True)
        return {"prompt_embeds": states}

    def export_prefixes(self) -> dict[str, str]:
        return {"unet": "lora_unet", "text_encoder": "lora_te"}

    def metadata(self) -> dict[str, str]:
        v2 = "stable-diffusion-v2-768-v" if self.prediction_type == "v_prediction" else "stable-diffusion-v2-512"
        return {
            "modelspec.architecture": f"{'stable-diffusion-v1' if self.release == 'sd1' else v2}/lora",
            "ss_base_model_version": "sd_v1" if self.release == "sd1" else "sd_v2",
            "ss_clip_skip": str(self.settings.clip_skip),
            **super().metadata(),
        }


FAMILY = SD15
