"""Qwen-Image (Qwen team 2025, arXiv 2508.02324): the text-to-image releases (Qwen-Image, -2512) and their fine-tunes.

2 x 2 latent pixels are a token; rotary positions are counted from the picture's middle, and the text stands on its diagonal.
Qwen2.5-VL reads the caption inside a template, whose first tokens are dropped from what it makes of it; the rest is trimmed
and masked. Previews with guidance keep the length of the answer with the prompt. All as diffusers' QwenImagePipeline does it.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from ...bases.components import Networks
from ...bases.llm_tokenizers import QWEN2_PLACES, find_llm_tokenizer
from ...bases.parts import Transformer
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.captions import LanguageModel
from ...diffusion.packing import pack, unpack
from ...diffusion.prompts import MASK
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.slots import Slot, flat
from . import vae
from .names import PATCH, build, derive
from .network import keep_in_range
from .variant import refuse_variants

TOKENS = 512
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships "
    "of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = 34
"""Tokens of the template before the caption."""
LAYER = -1
QWEN2_5_VL = llm_text.language_slot(
    "text_encoder", "qwen2_5_vl", "Qwen2.5-VL-7B (qwen_2.5_vl_7b_fp8_scaled.safetensors)", (LAYER,),
    ("text_encoders.qwen25_7b.transformer.", "text_encoders.qwen25_7b."),
)  # fmt: skip


class QwenImage(TransformerFamily):
    name = "qwen_image"
    title = "Qwen-Image"
    pipeline = "QwenImagePipeline"
    model_spec, base_version = "qwen-image", "qwen_image"
    masked = True
    side_multiple = 16
    usual_guidance = 4.0
    patch = PATCH
    network = Transformer(build, derive)
    slots = (QWEN2_5_VL, vae.QWEN_VAE)
    fits = (Fit("text_encoder", "hidden_size", "joint_attention_dim"), Fit("vae", "z_dim", "in_channels", PATCH**2))
    latents = vae.LATENTS
    block_lists: ClassVar = {"blocks": "transformer_blocks"}
    lora_targets: ClassVar = targets(
        r"transformer\.transformer_blocks\.\d+",
        r"attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)",
        r"(?:img|txt)_mlp\.net\.(?:0\.proj|2)",
        r"(?:img|txt)_mod\.1",
    )

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        refuse_variants(networks, source)
        super().__init__(source, settings, networks, tokens)
        self.latent_facts = ()

    def open_reader(self, networks: Networks, tokens: int | None) -> LanguageModel:
        tokenizer = find_llm_tokenizer(self.source, self.settings.tokenizer, "tokenizer", QWEN2_PLACES, "Qwen2.5")
        return LanguageModel(tokenizer, tokens or TOKENS, (TEMPLATE,), LAYER, DROPPED, around=(AFTER,))

    def keep_in_range(self, transformer: nn.Module) -> None:
        keep_in_range(transformer)

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, (height, width) = transformer.img_in.weight.dtype, x_t.shape[-2:]
        predicted: Tensor = transformer(
            hidden_states=pack(x_t.to(dtype)),
            timestep=timesteps.to(dtype) / 1000,
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=batch.get(MASK),
            img_shapes=[[(1, height // PATCH, width // PATCH)]] * len(x_t),
        ).sample
        return unpack(predicted, height, width)

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Each token is given the length of the answer with the prompt."""
        guided, length = super().guide(with_prompt, without, scale), pack(with_prompt).norm(dim=-1, keepdim=True)
        tokens = pack(guided)
        return unpack(tokens * (length / tokens.norm(dim=-1, keepdim=True)), *with_prompt.shape[-2:])

    def kohya_slots(self, path: str) -> Slot:
        return Slot(flat(path.removeprefix("transformer.")))


FAMILY = QwenImage
