"""Chroma (lodestones 2025): Chroma1-HD, Chroma1-Base and fine-tunes of them, made from FLUX.1 schnell.

Blocks, packing, positions and VAE are FLUX's. T5-XXL alone reads captions, its padding masked; of the padding the transformer
sees one token and no more, so captions are kept as long as they are, and one token. All modulations come from one small
network that knows the timestep only, and guidance is classifier-free. As diffusers' ChromaPipeline does it, but for its mask:
that one adds 1 to the scores of real tokens instead of hiding the others (diffusers issue 13619).
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from diffusers import ChromaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn

from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.parts import T5_XXL, VAE, Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion.packing import PATCH, pack, positions, unpack
from ...diffusion.prompts import MASK
from ...diffusion.transformer import TransformerFamily
from ...files.sources import Source
from ...seam.family import Batch, Example
from ...seam.slots import Slot, flat
from ..flux import names
from .signature import SIGNATURE

TOKENS = 512
NOT_CHROMAS = ("guidance_embeds", "pooled_projection_dim")
"""FLUX's entries that the released config has kept."""

_BLOCK = r"transformer\.(?:single_)?transformer_blocks\.\d+"
_ATTENTION = r"attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_MLP = r"ff(?:_context)?\.net\.(?:0\.proj|2)|proj_mlp|proj_out"


class Chroma(TransformerFamily):
    name = "chroma"
    title = "Chroma"
    signature = SIGNATURE
    masked = True
    side_multiple = 16
    usual_guidance = 5.0
    lora_loader = "FluxLoraLoaderMixin"
    patch = PATCH
    timestep_sampling = "parabola"
    training_shift = 1.0
    text_parts = ("text_encoder",)
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    before_blocks = ("distilled_guidance_layer.layers",)
    """The network of all modulations, which its users leave in 16 bits too."""
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
    }

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, t5: Any, tokens: int | None) -> None:
        super().__init__(source, settings, networks)
        config = self.components["transformer"].config
        self.tokenizer, self.tokens = t5, tokens or TOKENS
        self.token_limit = self.tokens - 1  # the end mark
        self.width = int(config["attention_head_dim"]) * int(config["num_attention_heads"])
        self.kohya_slots, self.kohya_as_released = self._kohya_slot, self.width == names.RELEASED_WIDTH

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "Chroma":
        cls.refuse_others(source)
        slots = (replace(T5_XXL, part="text_encoder"), VAE)
        networks = open_parts(source, settings, "chroma", Transformer(build, names.derive), slots)
        t5 = _tokenizers.find_t5_tokenizer(source, settings.tokenizer, "tokenizer")
        return cls(source, settings, networks, t5, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        text, vae, transformer = (self.components[name].config for name in ("text_encoder", "vae", "transformer"))
        return [
            ("text_encoder", int(text["d_model"]), int(transformer["joint_attention_dim"])),
            ("vae", int(vae["latent_channels"]) * PATCH**2, int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.tokenizer), self.tokens]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [self._ids(caption) for caption in captions]

    def _ids(self, caption: str) -> Example:
        """(L,) with the end mark, padded with 0; and how many of them are real, ()."""
        ids = self.tokenizer(caption, max_length=self.tokens, truncation=True).input_ids
        padded = torch.tensor([*ids, *[0] * (self.tokens - len(ids))], dtype=torch.int64)
        return {"input_ids": padded, "lengths": torch.tensor(len(ids))}

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """T5 sees no padding, the transformer the first token of it."""
        encoder, ids = cast(Any, model["text_encoder"]), batch["input_ids"]
        places, lengths = torch.arange(ids.shape[1], device=ids.device), batch["lengths"][:, None]
        embeds = encoder(input_ids=ids, attention_mask=(places < lengths).long()).last_hidden_state
        return {"prompt_embeds": embeds, MASK: places <= lengths}

    # -- training

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
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

    # -- output

    def _kohya_slot(self, path: str) -> Slot | None:
        found = names.original(path.removeprefix("transformer."), self.width)
        return Slot(flat(found.name), found.slot, found.rows) if found else None

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": "chroma/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "chroma",
            "ss_sd_model_name": self.source.title(),
        }


class HidesKeys(FluxAttnProcessor):
    """diffusers' masks hide every pair with padding in it, which leaves a padding token nothing to attend to, and a kernel
    may answer NaN. Here only keys are hidden: what padding sees is of no consequence."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """`attention_mask` (B, 1, L, L); its last row is an image token's."""
        keys = None if attention_mask is None else attention_mask[:, :, -1:]
        return super().__call__(attn, hidden_states, encoder_hidden_states, keys, image_rotary_emb)


def build(config: Mapping[str, Any]) -> nn.Module:
    known = {name: value for name, value in config.items() if name not in NOT_CHROMAS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of diffusers, to itself
        transformer = ChromaTransformer2DModel.from_config(known)
    for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):
        block.attn.set_processor(HidesKeys())
    with torch.device("cpu"):  # which modulation is asked for: a table of sines that no file has
        rows, channels = transformer.time_text_embed.mod_proj.shape
        transformer.time_text_embed = type(transformer.time_text_embed)(channels // 2, rows)
    built: nn.Module = transformer
    return built


FAMILY = Chroma
