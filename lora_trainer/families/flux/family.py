"""FLUX.1 (Black Forest Labs 2024): dev, schnell and their fine-tunes.

2 x 2 latent pixels are a token; its place in the picture is a rotary position, the text's is zero. CLIP-L gives the pooled
text, T5-XXL the sequence, of full length and without a mask, so its padding is part of what the model was trained on. dev
is distilled: guidance is an input, and training tells it `treino.orientacao` (1 by default). All as diffusers' FluxPipeline
does it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from ...bases import architecture
from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.parts import CLIP_L, T5_XXL, VAE, Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion import clip_text
from ...diffusion.packing import PATCH, pack, positions, unpack
from ...diffusion.transformer import TransformerFamily
from ...errors import SourceError, t
from ...files.sources import Source
from ...seam.family import Batch, Example
from ...seam.slots import Slot, flat
from . import names
from .signature import SIGNATURE

DEV_TOKENS, SCHNELL_TOKENS = 512, 256
SCHNELL_STEPS = 4

_BLOCK = r"transformer\.(?:single_)?transformer_blocks\.\d+"
_ATTENTION = r"attn\.(?:to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
_MLP = r"ff(?:_context)?\.net\.(?:0\.proj|2)|proj_mlp|proj_out"
_MODULATION = r"norm1?(?:_context)?\.linear"


class Flux(TransformerFamily):
    name = "flux"
    title = "FLUX.1"
    signature = SIGNATURE
    side_multiple = 16
    usual_guidance = 3.5
    lora_loader = "FluxLoraLoaderMixin"
    distilled = True
    patch = PATCH
    text_parts = ("text_encoder", "text_encoder_2")
    block_lists: ClassVar = {"double": "transformer_blocks", "single": "single_transformer_blocks"}
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP}|{_MODULATION})",
    }

    def __init__(
        self, source: Source, settings: ModelConfig, networks: Networks, clip: clip_text.Chunks, t5: Any, tokens: int | None
    ) -> None:
        super().__init__(source, settings, networks)
        self.clip, self.tokenizer = clip, t5
        self.guided = bool(self.components["transformer"].config.get("guidance_embeds"))
        config = self.components["transformer"].config
        self.width = int(config["attention_head_dim"]) * int(config["num_attention_heads"])
        self.kohya_slots = self._kohya_slot
        self.kohya_as_released = self.width == names.RELEASED_WIDTH
        self.tokens = tokens or (DEV_TOKENS if self.guided else SCHNELL_TOKENS)
        self.token_limit = self.tokens - 1  # the end mark
        if not self.guided:
            self.usual_steps = SCHNELL_STEPS
            self.notices.append(_schnell_notice())

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "Flux":
        cls.refuse_others(source)
        transformer = Transformer(FluxTransformer2DModel.from_config, names.derive)
        networks = open_parts(source, settings, "flux", transformer, (CLIP_L, T5_XXL, VAE))
        _refuse_controls(networks, source)
        standard = architecture.shipped("flux", "tokenizer")
        tokenizer = _tokenizers.find_tokenizer(source, settings.tokenizer, "tokenizer", standard)
        vocabulary = int(networks.components["text_encoder"].config["vocab_size"])
        clip = clip_text.make_chunks(tokenizer, None, vocabulary, source.what)
        t5 = _tokenizers.find_t5_tokenizer(source, settings.tokenizer, "tokenizer_2")
        return cls(source, settings, networks, clip, t5, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        config = {name: component.config for name, component in self.components.items()}
        transformer = config["transformer"]
        return [
            ("text_encoder", int(config["text_encoder"]["hidden_size"]), int(transformer["pooled_projection_dim"])),
            ("text_encoder_2", int(config["text_encoder_2"]["d_model"]), int(transformer["joint_attention_dim"])),
            ("vae", int(config["vae"]["latent_channels"]) * PATCH**2, int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.clip.tokenizer), _tokenizers.fingerprint(self.tokenizer), self.tokens]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [{"input_ids": self.clip.ids(caption), "input_ids_2": self._t5_ids(caption)} for caption in captions]

    def _t5_ids(self, caption: str) -> Tensor:
        """(L,) with the end mark, padded with 0."""
        ids = self.tokenizer(caption, padding="max_length", max_length=self.tokens, truncation=True).input_ids
        return torch.tensor([*ids, *[0] * (self.tokens - len(ids))], dtype=torch.int64)

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        clip, t5 = cast(Any, model["text_encoder"]), cast(Any, model["text_encoder_2"])
        pooled = clip(input_ids=batch["input_ids"][:, 0]).pooler_output
        return {"pooled_embeds": pooled, "prompt_embeds": t5(input_ids=batch["input_ids_2"]).last_hidden_state}

    # -- training

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
        dtype, (height, width) = transformer.x_embedder.weight.dtype, x_t.shape[-2:]
        guidance = batch.get("guidance", torch.full_like(timesteps, self.training_guidance, dtype=torch.float32))
        predicted: Tensor = transformer(
            hidden_states=pack(x_t.to(dtype)),
            timestep=timesteps.to(dtype) / 1000,
            guidance=guidance if self.guided else None,
            pooled_projections=batch["pooled_embeds"].to(dtype),
            encoder_hidden_states=batch["prompt_embeds"].to(dtype),
            txt_ids=torch.zeros(batch["prompt_embeds"].shape[1], 3, device=x_t.device),
            img_ids=positions(height // PATCH, width // PATCH, x_t.device),
        ).sample
        return unpack(predicted, height, width)

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        width = int(self.components["transformer"].config["pooled_projection_dim"])
        return {**super().example_batch(batch_size, size), "pooled_embeds": torch.zeros(batch_size, width)}

    # -- output

    def _kohya_slot(self, path: str) -> Slot | None:
        found = names.original(path.removeprefix("transformer."), self.width)
        if found is None or found.name.endswith("adaLN_modulation.1"):  # its halves are exchanged there
            return None
        return Slot(flat(found.name), found.slot, found.rows)

    def metadata(self) -> dict[str, str]:
        variant = "dev" if self.guided else "schnell"
        return {
            "modelspec.architecture": f"flux-1-{variant}/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "flux1",
            "ss_guidance_scale": str(self.training_guidance),
            "ss_sd_model_name": self.source.title(),
        }


def _refuse_controls(networks: Networks, source: Source) -> None:
    config = networks.components["transformer"].config
    has, takes = int(config["in_channels"]), int(networks.components["vae"].config["latent_channels"]) * PATCH**2
    if (has > takes and has % takes == 0) or has == 384:
        raise SourceError(
            t(
                pt=f"{source.title()} é um FLUX.1 Fill, Depth ou Canny ({has} canais de entrada)",
                en=f"{source.title()} is a FLUX.1 Fill, Depth or Canny ({has} input channels)",
            ),
            t(pt="use o FLUX.1 dev de que ele foi feito; o LoRA também funciona na variante",
              en="use the FLUX.1 dev it was made from; the LoRA works on the variant as well"),
            source.what,
        )  # fmt: skip


def _schnell_notice() -> str:
    return t(
        pt="o modelo base é um FLUX.1 schnell, destilado para 4 passos: treinar nele desfaz aos poucos a destilação; treine "
        "no FLUX.1 dev (o LoRA também funciona no schnell), ou prefira poucos passos e taxa baixa",
        en="the base is a FLUX.1 schnell, distilled to 4 steps: training on it undoes the distillation bit by bit; train on "
        "FLUX.1 dev (the LoRA works on schnell too), or prefer few steps and a low rate",
    )


FAMILY = Flux
