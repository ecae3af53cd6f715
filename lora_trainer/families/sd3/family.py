"""Stable Diffusion 3 and 3.5 (Esser et al. 2024): one attention over picture and text, three text encoders, guidance.

CLIP-L and CLIP-G are read at their last but one layer; their states stand side by side, filled up with zeros to T5's width,
and T5's stand after them, of full length and without a mask. The pooled text is that of both CLIPs. T5 may be left out: then
its tokens are zeros. Noise is shifted by 3 at any size. All as diffusers' StableDiffusion3Pipeline does it. Left out: LoRA on
the text encoders, skip-layer guidance.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...bases import architecture
from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.parts import Transformer, open_parts
from ...config.names import shown
from ...config.schema import ModelConfig
from ...diffusion import clip_text
from ...diffusion.transformer import TransformerFamily
from ...errors import ConfigError, t
from ...files.sources import Source
from ...layouts import fused
from ...seam.family import Batch, Example
from . import names as _sd3_names
from .parts import SLOTS, build, refuse_flux_vae
from .signature import SIGNATURE

TOKENS = 256
PATCH = 2

_BLOCK = r"transformer\.transformer_blocks\.\d+"
_ATTENTION = r"attn2?\.(?:to_[qkv]|to_out\.0)|attn\.(?:add_[qkv]_proj|to_add_out)"
_MLP = r"ff(?:_context)?\.net\.(?:0\.proj|2)"
_MODULATION = r"norm1(?:_context)?\.linear"


class SD3(TransformerFamily):
    name = "sd3"
    title = "Stable Diffusion 3"
    signature = SIGNATURE
    side_multiple = 16
    usual_guidance = 4.5
    lora_loader = "SD3LoraLoaderMixin"
    kohya_as_released = False  # diffusers reads no kohya files of SD3; ComfyUI and Forge do
    patch = PATCH
    sizes: ClassVar = {3.0: "sd3", 9.0: "sd3_large"}
    block_lists: ClassVar = {"joint": "transformer_blocks"}
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention": rf"{_BLOCK}\.(?:{_ATTENTION})",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP}|{_MODULATION})",
    }

    def __init__(
        self,
        source: Source,
        settings: ModelConfig,
        networks: Networks,
        clips: Sequence[clip_text.Chunks],
        t5: Any,
        tokens: int | None,
    ) -> None:
        self.text_parts = tuple(name for name in networks.components if name.startswith("text_encoder"))
        super().__init__(source, settings, networks)
        self.clips, self.t5, self.tokens = tuple(clips), t5, tokens or TOKENS
        self.token_limit = self.tokens - 1 if t5 is not None else clip_text.CHUNK  # but for the end mark
        self.transformer = self.components["transformer"].config
        self.kohya_slots = self._kohya_slot
        shift = float(self.schedule_config.get("shift", 1.0))
        self.last_level = shift / (1000 + shift - 1)  # FlowMatchEulerDiscreteScheduler's sigma_min
        self.notices += [] if t5 is not None else [_without_t5()]

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "SD3":
        cls.refuse_others(source)
        networks = open_parts(source, settings, "sd3", Transformer(build, _sd3_names.derive), SLOTS)
        refuse_flux_vae(networks)
        clips = []
        for part in ("text_encoder", "text_encoder_2"):
            name = part.replace("text_encoder", "tokenizer")
            tokenizer = _tokenizers.find_tokenizer(source, settings.tokenizer, name, architecture.shipped("sd3", name))
            vocabulary = int(networks.components[part].config["vocab_size"])
            clips.append(clip_text.make_chunks(tokenizer, None, vocabulary, source.what))
        has_t5 = "text_encoder_3" in networks.components
        t5 = _tokenizers.find_t5_tokenizer(source, settings.tokenizer, "tokenizer_3") if has_t5 else None
        return cls(source, settings, networks, clips, t5, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        config = {name: component.config for name, component in self.components.items()}
        pooled, first = int(config["transformer"]["pooled_projection_dim"]), int(config["text_encoder"]["hidden_size"])
        wanted = [
            ("text_encoder_2", int(config["text_encoder_2"]["projection_dim"]), pooled - first),
            ("vae", int(config["vae"]["latent_channels"]), int(config["transformer"]["in_channels"])),
        ]
        if "text_encoder_3" in config:
            joint = int(config["transformer"]["joint_attention_dim"])
            wanted.append(("text_encoder_3", int(config["text_encoder_3"]["d_model"]), joint))
        return wanted

    # -- captions

    def tokenizers(self) -> list[Any]:
        found = [_tokenizers.fingerprint(clip.tokenizer) for clip in self.clips]
        return found if self.t5 is None else [*found, _tokenizers.fingerprint(self.t5), self.tokens]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        first, second = self.clips
        both = [{"input_ids": first.ids(caption), "input_ids_2": second.ids(caption)} for caption in captions]
        if self.t5 is None:
            return both
        return [{**ids, "input_ids_3": self._t5_ids(caption)} for ids, caption in zip(both, captions, strict=True)]

    def _t5_ids(self, caption: str) -> Tensor:
        """(L,) with the end mark, padded with 0."""
        ids = self.t5(caption, padding="max_length", max_length=self.tokens, truncation=True).input_ids
        return torch.tensor([*ids, *[0] * (self.tokens - len(ids))], dtype=torch.int64)

    def count_tokens(self, caption: str) -> int:
        if self.t5 is None:
            return len(self.clips[0].tokens(caption))
        return len(self.t5(caption, add_special_tokens=False, verbose=False).input_ids)

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """Without T5, the 77 tokens of the CLIPs alone; `predict` adds the zeros."""
        first, second = (
            cast(Any, model[part])(input_ids=batch[ids][:, 0], output_hidden_states=True)
            for part, ids in (("text_encoder", "input_ids"), ("text_encoder_2", "input_ids_2"))
        )
        states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)
        states = pad(states, (0, int(self.transformer["joint_attention_dim"]) - states.shape[-1]))
        if "text_encoder_3" in model:
            t5 = cast(Any, model["text_encoder_3"])
            states = torch.cat([states, t5(input_ids=batch["input_ids_3"]).last_hidden_state], 1)
        # CLIP-L's projection, where a folder has one, is the identity
        pooled = first.text_embeds if hasattr(first, "text_embeds") else first.pooler_output
        return {"prompt_embeds": states, "pooled_embeds": torch.cat([pooled, second.text_embeds], -1)}

    # -- training

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
        dtype, text = transformer.pos_embed.proj.weight.dtype, batch["prompt_embeds"]
        predicted: Tensor = transformer(
            hidden_states=x_t.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=pad(text, (0, 0, 0, self.tokens if self.t5 is None else 0)).to(dtype),
            pooled_projections=batch["pooled_embeds"].to(dtype),
        ).sample
        return predicted

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        self._check_size(size)
        pooled = torch.zeros(batch_size, int(self.transformer["pooled_projection_dim"]))
        return {**super().example_batch(batch_size, size), "pooled_embeds": pooled}

    def longest(self) -> int:
        return clip_text.CHUNK + 2 + (self.tokens if self.t5 is not None else 0)

    def _check_size(self, size: tuple[int, int]) -> None:
        most = int(self.transformer["pos_embed_max_size"]) * self.side_multiple
        if max(size) > most:
            raise ConfigError(
                t(pt=f"{max(size)} pixels de lado, e este modelo base vai até {most}",
                  en=f"{max(size)} pixels a side, and this base goes up to {most}"),
                t(pt="diminua a resolução", en="lower the resolution"),
                shown("data", "resolution"),
            )  # fmt: skip

    # -- output

    def _kohya_slot(self, path: str) -> fused.Slot | None:
        found = _sd3_names.original(path.removeprefix("transformer."), int(self.transformer["num_layers"]))
        if found is None:
            return None
        width = int(self.transformer["caption_projection_dim"])
        rows = () if found.third is None else (width,) * 3
        return fused.Slot(fused.flat(found.name), found.third or 0, rows, found.swapped)

    def metadata(self) -> dict[str, str]:
        release = "5-" if self.transformer.get("qk_norm") else ""
        release += "large" if int(self.transformer["num_layers"]) > 24 else "medium"
        return {
            "modelspec.architecture": f"stable-diffusion-3-{release}/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": release,
            "ss_sd_model_name": self.source.title(),
        }


def _without_t5() -> str:
    return t(
        pt="sem T5 (modelo.codificador_texto_3): só os dois CLIP leem as legendas, até 75 tokens de cada; o LoRA também "
        "funciona com o T5 na geração",
        en="without T5 (model.text_encoder_3): only the two CLIPs read captions, 75 tokens of each; the LoRA also works with "
        "T5 when making images",
    )


FAMILY = SD3
