"""Tiny models of the real classes, shaped as SD 1.5 and SDXL, with stand-ins for what adapters ask of a family."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_trainer.adapters import Adapter, inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.diffusion.unet import LORA_TARGETS, TEXT_TARGETS
from lora_trainer.files.sources import Source
from lora_trainer.seam.readers import UNETS


@dataclass(frozen=True)
class TinyFamily:
    prefixes: dict[str, str]
    lora_targets = LORA_TARGETS
    text_targets = TEXT_TARGETS
    formats = UNETS
    loader_kinds = ("lora",)
    kohya_slots = None
    source = Source(Path(), "file", "")
    title = "SD"

    @property
    def pipeline(self) -> str:
        return f"StableDiffusion{'XL' if 'text_encoder_2' in self.prefixes else ''}Pipeline"

    def chosen_formats(self, asked: list[str]) -> tuple[str, ...]:
        return tuple("kohya" if name == "auto" else name for name in asked)

    def export_prefixes(self) -> dict[str, str]:
        return self.prefixes

    def metadata(self) -> dict[str, str]:
        xl = "text_encoder_2" in self.prefixes
        return {
            "modelspec.architecture": f"stable-diffusion-{'xl-v1-base' if xl else 'v1'}/lora",
            "ss_base_model_version": "sdxl_base_v1-0" if xl else "sd_v1",
        }


SD15 = TinyFamily({"unet": "lora_unet", "text_encoder": "lora_te"})
SDXL = TinyFamily({"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"})


def _text_config(width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def sd15_model(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        cross_attention_dim=16,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
    )
    return nn.ModuleDict({"unet": unet, "text_encoder": CLIPTextModel(_text_config(16))})


def sdxl_model(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        layers_per_block=2,
        block_out_channels=(16, 32),
        cross_attention_dim=40,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        transformer_layers_per_block=1,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=24 + 6 * 4,
    )
    return nn.ModuleDict(
        {
            "unet": unet,
            "text_encoder": CLIPTextModel(_text_config(16)),
            "text_encoder_2": CLIPTextModelWithProjection(_text_config(24)),
        }
    )


MODELS: dict[str, tuple[Callable[..., nn.ModuleDict], TinyFamily]] = {
    "sd15": (sd15_model, SD15),
    "sdxl": (sdxl_model, SDXL),
}


def forward(model: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output for one fixed batch: token ids through the encoders into the UNet. (B, 4, 8, 8)."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(2, 4, 8, 8, generator=random).to(dtype)
    ids = torch.tensor([[0, 5, 9, 30, 1, 1, 1, 1], [0, 40, 41, 42, 43, 44, 1, 1]])
    steps = torch.tensor([10, 700])
    first = model["text_encoder"](ids, output_hidden_states=True)
    if "text_encoder_2" not in model:
        return model["unet"](x, steps, first.last_hidden_state).sample
    second = model["text_encoder_2"](ids, output_hidden_states=True)
    embeds = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    conditions = {"text_embeds": second.text_embeds, "time_ids": torch.full((2, 6), 8.0, dtype=dtype)}
    return model["unet"](x, steps, embeds, added_cond_kwargs=conditions).sample


def pipeline(name: str, model: nn.ModuleDict) -> Any:
    """A real pipeline around the given modules, for its load_lora_weights."""
    common = {"vae": None, "scheduler": None, "tokenizer": None, "unet": model["unet"], "feature_extractor": None}
    if name == "sd15":
        return StableDiffusionPipeline(
            **common, text_encoder=model["text_encoder"], safety_checker=None, requires_safety_checker=False
        )
    return StableDiffusionXLPipeline(
        **common, text_encoder=model["text_encoder"], text_encoder_2=model["text_encoder_2"], tokenizer_2=None
    )


def trained(name: str, seed: int = 3, **settings: Any) -> tuple[nn.ModuleDict, Adapter, TinyFamily]:
    """A model whose adapter has left its start: random B of a size that shows in the output."""
    build, family = MODELS[name]
    model = build()
    adapter = inject(model, family, ModelConfig(**settings), seed)
    perturb(adapter)
    return model, adapter, family


@torch.no_grad()
def perturb(adapter: Adapter) -> None:
    random = torch.Generator().manual_seed(11)
    starts = any(key.endswith("start_A") for key in adapter.named_tensors())
    for key, parameter in adapter.named_parameters().items():
        if starts:  # PiSSA: small beside what it starts from
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=random))
        elif "lora_B" in key or key.endswith(("hada_w2_a", "lokr_w2", "lokr_w2_b")):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
        elif "magnitude" in key:
            parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=random))
