"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): one attention over picture and text, three text encoders, guidance.

CLIP-L and CLIP-G are read at their last but one layer; their states stand side by side, filled up with zeros to T5's width,
and T5's stand after them, of full length and without a mask. The pooled text is that of both CLIPs. T5 may be left out: then
its tokens are zeros. Noise is shifted by 3 at any size. All as diffusers' StableDiffusion3Pipeline does it. Left out: LoRA on
the text encoders, skip-layer guidance.
"""

from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import pad

from ...bases import tokenizers
from ...bases.components import Networks
from ...bases.parts import Transformer
from ...config.names import shown
from ...config.schema import ModelConfig
from ...diffusion import clip_text
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...errors import ConfigError, t
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.readers import KOHYA_WITHOUT_DIFFUSERS
from . import names
from .captions import CLIP_TOKENS, ClipsAndT5
from .network import build
from .variant import SLOTS, refuse_flux_vae, without_t5

TOKENS = 256
PATCH = 2
BLOCK = r"transformer\.transformer_blocks\.\d+"


class SD3(TransformerFamily):
    name = "sd3"
    title = "Stable Diffusion 3"
    pipeline = "StableDiffusion3Pipeline"
    side_multiple = 16
    usual_guidance = 4.5
    formats = KOHYA_WITHOUT_DIFFUSERS  # diffusers reads no kohya files of SD3; ComfyUI and Forge do
    patch = PATCH
    pooled_width = "pooled_projection_dim"
    sizes: ClassVar = {3.0: "sd3", 9.0: "sd3_large"}
    network = Transformer(build, names.derive)
    original = names.SD3
    slots = SLOTS
    fits = (
        Fit("text_encoder_2", "projection_dim", "pooled_projection_dim", beside=("text_encoder", "hidden_size")),
        Fit("vae", "latent_channels", "in_channels"),
        Fit("text_encoder_3", "d_model", "joint_attention_dim"),
    )
    block_lists: ClassVar = {"joint": "transformer_blocks"}
    lora_targets: ClassVar = targets(
        BLOCK,
        r"attn2?\.(?:to_[qkv]|to_out\.0)|attn\.(?:add_[qkv]_proj|to_add_out)",
        r"ff(?:_context)?\.net\.(?:0\.proj|2)",
        r"norm1(?:_context)?\.linear",
    )
    reader: ClipsAndT5

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        refuse_flux_vae(networks)
        super().__init__(source, settings, networks, tokens)
        shift = float(self.schedule_config.get("shift", 1.0))
        self.last_level = shift / (1000 + shift - 1)  # FlowMatchEulerDiscreteScheduler's sigma_min
        self.notices += [] if self.reader.t5 is not None else [without_t5()]
        self.base_version = "5-" if self.config.get("qk_norm") else ""
        self.base_version += "large" if int(self.config["num_layers"]) > 24 else "medium"
        self.model_spec = f"stable-diffusion-3-{self.base_version}"

    def open_reader(self, networks: Networks, tokens: int | None) -> ClipsAndT5:
        source, settings = self.source, self.settings
        clips = tuple(
            clip_text.open_chunks(source, settings, networks, "sd3", part, None) for part in ("text_encoder", "text_encoder_2")
        )
        has_t5 = "text_encoder_3" in networks.components
        t5 = tokenizers.find_t5_tokenizer(source, settings.tokenizer, "tokenizer_3") if has_t5 else None
        tokenizer = clips[0].tokenizer if t5 is None else t5
        return ClipsAndT5(tokenizer, tokens or TOKENS, clips, t5, int(self.config["joint_attention_dim"]))

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, text = transformer.pos_embed.proj.weight.dtype, batch["prompt_embeds"]
        predicted: Tensor = transformer(
            hidden_states=x_t.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=pad(text, (0, 0, 0, self.tokens if self.reader.t5 is None else 0)).to(dtype),
            pooled_projections=batch["pooled_embeds"].to(dtype),
        ).sample
        return predicted

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        self._check_size(size)
        return super().example_batch(batch_size, size)

    def longest(self) -> int:
        return CLIP_TOKENS + (self.tokens if self.reader.t5 is not None else 0)

    def _check_size(self, size: tuple[int, int]) -> None:
        most = int(self.config["pos_embed_max_size"]) * self.side_multiple
        if max(size) > most:
            raise ConfigError(
                t(pt=f"{max(size)} pixels de lado, e este modelo base vai até {most}",
                  en=f"{max(size)} pixels a side, and this base goes up to {most}"),
                t(pt="diminua a resolução", en="lower the resolution"),
                shown("data", "resolution"),
            )  # fmt: skip


FAMILY = SD3
