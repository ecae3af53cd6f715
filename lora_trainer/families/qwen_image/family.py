"""Qwen-Image (Qwen team 2025, arXiv 2508.02324): the text-to-image releases (Qwen-Image, -2512) and their fine-tunes.

2 x 2 latent pixels are a token; rotary positions are counted from the picture's middle, and the text stands on its diagonal.
Qwen2.5-VL reads the caption inside a template, whose first tokens are dropped from what it makes of it; the rest is trimmed
and masked. Previews with guidance keep the length of the answer with the prompt. All as diffusers' QwenImagePipeline does it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.llm_tokenizers import QWEN2_PLACES, find_llm_tokenizer
from ...bases.parts import Config, Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.packing import pack, unpack
from ...diffusion.prompts import MASK
from ...diffusion.transformer import TransformerFamily
from ...errors import SourceError, t
from ...files.sources import Source
from ...seam.family import Batch, Example, Framing, Prepare
from ...seam.slots import Slot, flat
from . import vae as _qwen_vae
from .names import PATCH, build, derive
from .ranges import keep_in_range
from .signature import SIGNATURE

TOKENS = 512
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships "
    "of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DROPPED, AFTER = 34, 5
"""Tokens of the template before the caption, and after it."""
LAYERS = (-1,)
QWEN2_5_VL = llm_text.language_slot(
    "text_encoder", "qwen2_5_vl", "Qwen2.5-VL-7B (qwen_2.5_vl_7b_fp8_scaled.safetensors)", LAYERS,
    ("text_encoders.qwen25_7b.transformer.", "text_encoders.qwen25_7b."),
)  # fmt: skip
EDIT_PIPELINES = ("Edit", "Layered", "ControlNet", "Inpaint")

_BLOCK = r"transformer\.transformer_blocks\.\d+"
_ATTENTION = r"attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_MLP = r"(?:img|txt)_mlp\.net\.(?:0\.proj|2)"
_MODULATION = r"(?:img|txt)_mod\.1"


class QwenImage(TransformerFamily):
    name = "qwen_image"
    title = "Qwen-Image"
    signature = SIGNATURE
    masked = True
    side_multiple = 16
    usual_guidance = 4.0
    lora_loader = "QwenImageLoraLoaderMixin"
    patch = PATCH
    text_parts = ("text_encoder",)
    block_lists: ClassVar = {"blocks": "transformer_blocks"}
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.{_ATTENTION}",
        "attention": rf"{_BLOCK}\.{_ATTENTION}",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP}|{_MODULATION})",
    }

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokenizer: Any, tokens: int | None) -> None:
        super().__init__(source, settings, networks)
        self.tokenizer, self.tokens = tokenizer, tokens or TOKENS
        self.token_limit = self.tokens - AFTER
        self.kohya_slots = _kohya_slot

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "QwenImage":
        cls.refuse_others(source)
        networks = open_parts(source, settings, "qwen_image", Transformer(build, derive), (QWEN2_5_VL, _qwen_vae.QWEN_VAE))
        _refuse_variants(networks.components["transformer"].config, source)
        tokenizer = find_llm_tokenizer(source, settings.tokenizer, "tokenizer", QWEN2_PLACES, "Qwen2.5")
        return cls(source, settings, networks, tokenizer, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        transformer, text = self.components["transformer"].config, self.components["text_encoder"].config
        return [
            ("text_encoder", int(llm_text.text_config(text)["hidden_size"]), int(transformer["joint_attention_dim"])),
            ("vae", int(self.components["vae"].config["z_dim"]) * PATCH**2, int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.tokenizer), self.tokens, TEMPLATE]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        ids = (self.tokenizer(TEMPLATE.format(caption), verbose=False).input_ids for caption in captions)
        return [llm_text.padded(one, DROPPED + self.tokens, self.tokenizer.pad_token_id or 0) for one in ids]

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        ids, mask = llm_text.cut_padding(batch["input_ids"], batch["attention_mask"])
        [embeds] = llm_text.hidden_states(model["text_encoder"], ids, mask, LAYERS)
        return {"prompt_embeds": embeds[:, DROPPED:], MASK: mask[:, DROPPED:]}

    # -- images

    def image_fingerprint(self) -> str:
        return self.components["vae"].fingerprint()

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        return [{"latents": latents.clone()} for latents in _qwen_vae.encode(vae, pixels)]

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _qwen_vae.decode(vae, latents)

    def latents_shape(self, batch_size: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        vae = self.components["vae"].config
        width, height = (side // _qwen_vae.factor(vae) for side in size)
        return batch_size, int(vae["z_dim"]), height, width

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        model = super().load_model(device, dtype, with_text=with_text, prepare=prepare)
        if dtype is torch.float16:
            keep_in_range(model["transformer"])
        return model

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
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

    # -- output

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": "qwen-image/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "qwen_image",
            "ss_sd_model_name": self.source.title(),
        }


def _kohya_slot(path: str) -> Slot:
    return Slot(flat(path.removeprefix("transformer.")))


def _refuse_variants(config: Config, source: Source) -> None:
    """Which look alike but for a flag; an Edit of 2025 can only be told by its folder."""
    pipeline = str((source.config("model_index") or {}).get("_class_name", ""))
    flags = ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
    if any(word in pipeline for word in EDIT_PIPELINES) or any(config.get(flag) for flag in flags):
        name = pipeline.removesuffix("Pipeline") or "Qwen-Image-Edit / Layered"
        raise SourceError(
            t(
                pt=f"{source.title()} é um {name}, que desenha a partir de outras imagens",
                en=f"{source.title()} is a {name}, which draws from other pictures",
            ),
            t(
                pt="treine no Qwen-Image ou no Qwen-Image-2512; o LoRA costuma funcionar também no Edit",
                en="train on Qwen-Image or Qwen-Image-2512; the LoRA mostly works on Edit as well",
            ),
            source.what,
        )


FAMILY = QwenImage
