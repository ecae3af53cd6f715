"""Real UNets at tiny size, SD 1.x-like and SDXL-like, with a family around them that only trains.

Loading, captions and export belong to the real families and have tests of their own.
"""

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_trainer.config.schema import TrainingConfig
from lora_trainer.diffusion.diffusion import DiffusionFamily, make_objective
from lora_trainer.seam.family import Batch, BlockGroup

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
ATTENTION = r".*attn\d\.(to_q|to_k|to_v|to_out\.0)"
ALL = r".*(to_q|to_k|to_v|to_out\.0|ff\.net\.2|proj_in|proj_out|conv1|conv2|time_emb_proj)"

COMMON: dict[str, Any] = {
    "sample_size": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
    "block_out_channels": (16, 32),
}
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {
        **COMMON,
        "attention_head_dim": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
    "sdxl": {
        **COMMON,
        "attention_head_dim": (2, 4),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
    },
}


class TinyFamily(DiffusionFamily):
    def __init__(self, kind: str, prediction_type: Any = "epsilon", **training: Any) -> None:
        self.kind, self.prediction_type, self.schedule_config = kind, prediction_type, dict(SCHEDULE)
        self.objective = make_objective(TrainingConfig(**training), self)

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        added = {"text_embeds": batch["pooled_embeds"], "time_ids": batch["time_ids"]} if self.kind == "sdxl" else None
        return model["unet"](x_t, timesteps, batch["prompt_embeds"], added_cond_kwargs=added).sample

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        kinds = (ResnetBlock2D, BasicTransformerBlock, Downsample2D, Upsample2D)
        unet = model["unet"]
        runs = {"down": unet.down_blocks, "mid": unet.mid_block, "up": unet.up_blocks}
        return [BlockGroup(name, [m for m in run.modules() if isinstance(m, kinds)]) for name, run in runs.items()]


TinyFamily.__abstractmethods__ = frozenset()


def make_model(
    kind: str, targets: str = ATTENTION, *, dtype: torch.dtype = torch.float32, **lora: Any
) -> nn.ModuleDict:
    """Frozen UNet in `dtype` with a float32 adapter whose B is not zero, so that every weight has a gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.ModuleDict({"unet": UNet2DConditionModel(**UNETS[kind])}).requires_grad_(False)
        settings = LoraConfig(**{"r": 4, "lora_alpha": 2, "init_lora_weights": False, **lora}, target_modules=targets)
        inject_adapter_in_model(settings, model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def make_batch(size: int, *, first: int = 0) -> Batch:
    """Examples number `first`, `first` + 1, …: the same example is the same in whatever batch."""
    return stack([example(first + index) for index in range(size)])


def stack(examples: list[Batch]) -> Batch:
    return {name: torch.stack([e[name] for e in examples]) for name in examples[0]}


def example(index: int) -> Batch:
    rng = torch.Generator().manual_seed(index)
    return {
        "latents": torch.randn(4, 8, 8, generator=rng),
        "prompt_embeds": torch.randn(5, 24, generator=rng),
        "pooled_embeds": torch.randn(16, generator=rng),
        "time_ids": torch.tensor([64.0, 64, 0, 0, 64, 64]),
        "seeds": torch.tensor(1000 + index),
        "weight": torch.tensor(1.0),
    }


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
