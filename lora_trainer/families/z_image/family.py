"""Z-Image (Tongyi-MAI 2025): the base, Turbo, and fine-tunes of either.

One stream of tokens, the picture's before the caption's, each filled up to a multiple of 32 with a learnt token; a caption's
place is counted along the first rotary axis, and the picture stands behind it. Qwen3-4B reads the caption inside its chat
template, and its last layer but one is what the transformer sees, without padding. Time runs from noise (0) to picture (1)
and the answer points the same way, so both are turned round. All as diffusers' ZImagePipeline does it; noise levels in
training as the authors drew them (arXiv 2511.22699, section 4.3): logit-normal, shifted for the picture's size.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from ...bases import llm_tokenizers
from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.parts import VAE, Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.prompts import MASK
from ...diffusion.transformer import TransformerFamily
from ...engine.host import is_fake
from ...files.sources import Source
from ...seam.family import Batch, Example, Prepare
from ...seam.slots import Slot, flat
from . import names
from .ranges import keep_in_range
from .signature import SIGNATURE
from .variant import TURBO_STEPS, omni_refusal, turbo_notice, variant_of

TOKENS, PATCH = 512, 2
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
LAYERS = (-2,)
QWEN3 = llm_text.language_slot(
    "text_encoder", "qwen3", "Qwen3-4B (qwen_3_4b.safetensors)", LAYERS,
    ("text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_4b."),
)  # fmt: skip

_BLOCK = r"transformer\.(?:layers|noise_refiner|context_refiner)\.\d+"
_ATTENTION = r"attention\.(?:to_[qkv]|to_out\.0)"
_MLP = r"feed_forward\.w[123]"
_MODULATION = r"adaLN_modulation\.0"


class ZImage(TransformerFamily):
    name = "z_image"
    title = "Z-Image"
    signature = SIGNATURE
    masked = True
    text_width = "cap_feat_dim"
    side_multiple = 16
    usual_guidance = 5.0
    lora_loader = "ZImageLoraLoaderMixin"
    patch = PATCH
    training_shift = "resolution"
    text_parts = ("text_encoder",)
    block_lists: ClassVar = {name: name for name in ("noise_refiner", "context_refiner", "layers")}
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.{_ATTENTION}",
        "attention": rf"{_BLOCK}\.{_ATTENTION}",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP}|{_MODULATION})",
    }

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokenizer: Any, tokens: int | None) -> None:
        super().__init__(source, settings, networks)
        self.tokenizer, self.tokens = tokenizer, tokens or TOKENS
        self.token_limit = self.tokens - self.count_tokens(TEMPLATE.format(""))
        self.width = int(self.components["transformer"].config["dim"])
        self.kohya_slots = self._kohya_slot
        self.turbo = (variant := variant_of(source, settings)).turbo
        if variant.shift:
            self.schedule_config = {**self.schedule_config, "shift": variant.shift}
        if self.turbo:
            self.usual_guidance, self.usual_steps = 1.0, TURBO_STEPS
            self.notices += [] if settings.training_lora else [turbo_notice()]
        self.notices += [variant.notice] if variant.notice else []

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "ZImage":
        cls.refuse_others(source)
        transformer = Transformer(build, names.derive)
        networks = open_parts(source, settings, "z_image", transformer, (QWEN3, VAE))
        if networks.components["transformer"].config.get("siglip_feat_dim"):
            raise omni_refusal(source)
        find = llm_tokenizers.find_llm_tokenizer
        tokenizer = find(source, settings.tokenizer, "tokenizer", llm_tokenizers.QWEN3_PLACES, "Qwen3")
        return cls(source, settings, networks, tokenizer, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        transformer, text = self.components["transformer"].config, self.components["text_encoder"].config
        return [
            ("text_encoder", int(llm_text.text_config(text)["hidden_size"]), int(transformer["cap_feat_dim"])),
            ("vae", int(self.components["vae"].config["latent_channels"]), int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.tokenizer), self.tokens, TEMPLATE]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        ids = (self.tokenizer(TEMPLATE.format(caption), verbose=False).input_ids for caption in captions)
        return [llm_text.padded(one, self.tokens, self.tokenizer.pad_token_id or 0) for one in ids]

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        ids, mask = llm_text.cut_padding(batch["input_ids"], batch["attention_mask"])
        [embeds] = llm_text.hidden_states(model["text_encoder"], ids, mask, LAYERS)
        return {"prompt_embeds": embeds, MASK: mask}

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        model = super().load_model(device, dtype, with_text=with_text, prepare=prepare)
        if dtype is torch.float16:
            keep_in_range([block for group in self.blocks(model) for block in group.blocks])
        return model

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
        dtype = transformer.all_x_embedder[names.PATCH_KEY].weight.dtype
        pictures = list(x_t.to(dtype)[:, :, None].unbind())  # each (C, frames, H, W)
        answers = transformer(pictures, (1000 - timesteps) / 1000, captions(batch, dtype), return_dict=False)[0]
        return -torch.stack(answers).squeeze(2)

    # -- output

    def _kohya_slot(self, path: str) -> Slot | None:
        """None outside the blocks, where diffusers does not find the dots again."""
        if not re.match(_BLOCK, path):
            return None
        found = names.original(f"{path.removeprefix('transformer.')}.weight")
        name = flat(found.name.removesuffix(".weight"))
        return Slot(name) if found.third is None else Slot(name, found.third, (self.width,) * 3)

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": f"z-image{'-turbo' if self.turbo else ''}/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "zimage",
            "ss_sd_model_name": self.source.title(),
        }


def captions(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """Prompt embeds (L, D), each as long as it is."""
    embeds, mask = batch["prompt_embeds"].to(dtype), batch.get(MASK)
    if mask is None:
        return list(embeds.unbind())
    longest = embeds.shape[1]
    fakes = [longest, *[max(1, longest - 32)] * (len(embeds) - 1)]  # of unlike length, as the plan must take them to be
    lengths = fakes if is_fake(mask) else mask.sum(1).tolist()
    return [one[:length] for one, length in zip(embeds, lengths, strict=True)]


class Rotations:
    """diffusers' RopeEmbedder without its tables, which it would leave on the device after the first step: computed when asked
    for, to the same bit."""

    def __init__(self, theta: float, axes_dims: Sequence[int]) -> None:
        self.theta, self.axes_dims = theta, axes_dims

    def __call__(self, ids: Tensor) -> Tensor:
        """Places (L, axes) -> (L, head / 2) complex64."""
        angles = []
        for axis, dim in enumerate(self.axes_dims):
            steps = torch.arange(0, dim, 2, dtype=torch.float64, device=ids.device) / dim
            angles.append(torch.outer(ids[:, axis].double(), 1.0 / self.theta**steps).float())
        angle = torch.cat(angles, -1)
        return torch.polar(torch.ones_like(angle), angle)


def build(config: Mapping[str, Any]) -> nn.Module:
    transformer: Any = ZImageTransformer2DModel.from_config(dict(config))
    transformer.rope_embedder = Rotations(transformer.rope_theta, transformer.axes_dims)
    return cast(nn.Module, transformer)


FAMILY = ZImage
