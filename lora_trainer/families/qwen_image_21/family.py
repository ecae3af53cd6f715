"""Qwen-Image 2.1 (Qwen team 2026): text to image with the base, Turbo, and fine-tunes of either.

A latent pixel is a token, and stands for 16 x 16 of the picture. Qwen3-VL reads the caption inside a template; what its last
layer makes of it, before the final norm, is what the transformer sees, without the system's turn. Guidance is distilled into
the weights: previews have none unless asked. All as diffusers' QwenImage21Pipeline does it. Left out: pictures as a condition.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from ...bases import architecture
from ...bases import tokenizers as _tokenizers
from ...bases.components import Networks
from ...bases.llm_tokenizers import QWEN3_VL_PLACES, find_llm_tokenizer
from ...bases.parts import Transformer, open_parts
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.prompts import MASK
from ...diffusion.transformer import TransformerFamily
from ...errors import MachineError, t
from ...files.sources import Source
from ...seam.family import Batch, Example, Framing
from ...seam.slots import Slot, flat
from ..qwen_image import vae as _qwen_vae
from . import vae as _qwen21_vae
from .signature import SIGNATURE
from .variant import refuse_unknown, tower_notice, turbo_levels, turbo_notice

TOKENS = 512
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
USER, AFTER = "<|im_start|>user\n{}", "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = 14
"""Tokens of SYSTEM in the released vocabulary."""
LAYERS = (-1,)
QWEN3_VL = llm_text.language_slot(
    "text_encoder", "qwen3_vl", "Qwen3-VL-8B (qwen3vl_8b_bf16.safetensors)", LAYERS,
    ("text_encoders.qwen3vl_8b.transformer.", "text_encoders.qwen3vl_8b."), normed=False,
)  # fmt: skip

_BLOCK = r"transformer\.transformer_blocks\.\d+"
_ATTENTION = r"attn\.(?:to_[qkv]|to_out\.0)"
_MLP = r"img_mlp\.(?:gate_layer|proj|out)"


class QwenImage21(TransformerFamily):
    name = "qwen_image_21"
    title = "Qwen-Image 2.1"
    signature = SIGNATURE
    masked = True
    text_width = "context_in_dim"
    side_multiple = 32
    usual_guidance = 1.0
    lora_loader = "QwenImageLoraLoaderMixin"
    kohya_as_released = False  # diffusers' reader knows the first Qwen-Image's layers only
    patch = 1
    training_shift = "resolution"
    text_parts = ("text_encoder",)
    block_lists: ClassVar = {"blocks": "transformer_blocks"}
    lora_targets: ClassVar[dict[str, str]] = {
        "auto": rf"{_BLOCK}\.{_ATTENTION}",
        "attention": rf"{_BLOCK}\.{_ATTENTION}",
        "attention+mlp": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
        "all": rf"{_BLOCK}\.(?:{_ATTENTION}|{_MLP})",
    }

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokenizer: Any, tokens: int | None) -> None:
        super().__init__(source, settings, networks)
        self.tokenizer, self.tokens = tokenizer, tokens or TOKENS
        self.dropped, self.after = self.count_tokens(SYSTEM) or DROPPED, self.count_tokens(AFTER)
        self.token_limit = self.tokens - self.count_tokens(USER.format("")) - self.after
        transformer = self.components["transformer"].config
        width = int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"])
        self.inner, self.kohya_slots = width * int(transformer["mlp_ratio"]), self._kohya_slot
        self.notices += tower_notice(self.components["text_encoder"])
        self.levels = turbo_levels(source)
        if self.levels:
            self.usual_steps, unshifted = len(self.levels), {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None}
            self.schedule_config = {**architecture.shipped("qwen_image_21", "scheduler"), **unshifted}
            self.notices += [] if settings.training_lora else [turbo_notice(self.usual_steps)]

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "QwenImage21":
        cls.refuse_others(source)
        networks = open_parts(source, settings, "qwen_image_21", _transformer(), (QWEN3_VL, _qwen21_vae.QWEN_21_VAE))
        refuse_unknown(networks.components, source)
        tokenizer = find_llm_tokenizer(source, settings.tokenizer, "processor", QWEN3_VL_PLACES, "Qwen3-VL")
        return cls(source, settings, networks, tokenizer, max_caption_tokens)

    def widths(self) -> list[tuple[str, int, int]]:
        transformer, text = self.components["transformer"].config, self.components["text_encoder"].config
        return [
            ("text_encoder", int(llm_text.text_config(text)["hidden_size"]), int(transformer["context_in_dim"])),
            ("vae", int(self.components["vae"].config["z_dim"]), int(transformer["in_channels"])),
        ]

    # -- captions

    def tokenizers(self) -> list[Any]:
        return [_tokenizers.fingerprint(self.tokenizer), self.tokens, SYSTEM, USER, AFTER]

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        """A caption too long loses its own end, not the template's."""
        limit, examples = self.dropped + self.tokens, []
        for caption in captions:
            ids = self.tokenizer(f"{SYSTEM}{USER.format(caption or ' ')}{AFTER}", verbose=False).input_ids
            kept = ids if len(ids) <= limit else [*ids[: limit - self.after], *ids[-self.after :]]
            examples.append(llm_text.padded(kept, limit, self.tokenizer.pad_token_id or 0))
        return examples

    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        ids, mask = llm_text.cut_padding(batch["input_ids"], batch["attention_mask"])
        [embeds] = llm_text.hidden_states(model["text_encoder"], ids, mask, LAYERS)
        return {"prompt_embeds": embeds[:, self.dropped :], MASK: mask[:, self.dropped :]}

    # -- images

    def image_fingerprint(self) -> str:
        return self.components["vae"].fingerprint()

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        return [{"latents": latents.clone()} for latents in _qwen21_vae.encode(vae, pixels)]

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        return _qwen21_vae.decode(vae, latents)

    def latents_shape(self, batch_size: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        vae = self.components["vae"].config
        width, height = (side // _qwen_vae.factor(vae) for side in size)
        return batch_size, int(vae["z_dim"]), height, width

    # -- training

    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        batch = self.with_prompts(model, batch)
        transformer = cast(Any, model["transformer"])
        dtype, size = transformer.img_in.weight.dtype, tuple(x_t.shape[-2:])
        text, mask = batch["prompt_embeds"].to(dtype), batch.get(MASK)
        tokens = x_t.to(dtype).flatten(2).transpose(1, 2)
        predicted: Tensor = transformer(tokens, timesteps.to(dtype) / 1000, text, mask, size)
        return predicted.transpose(1, 2).unflatten(2, size)

    # -- output

    def _kohya_slot(self, path: str) -> Slot:
        """As ComfyUI and musubi-tuner have it, whose gate and value are one matrix."""
        name = flat(path.removeprefix("transformer."))
        for half, ending in enumerate(("gate_layer", "proj")):
            if name.endswith(f"img_mlp_{ending}"):
                return Slot(f"{name.removesuffix(ending)}gate_up", half, (self.inner, self.inner))
        return Slot(name)

    def metadata(self) -> dict[str, str]:
        return {
            "modelspec.architecture": "qwen-image-2.1/lora",
            "modelspec.prediction_type": "flow",
            "ss_base_model_version": "qwen_image_21",
            "ss_sd_model_name": self.source.title(),
        }


def _transformer() -> Transformer:
    try:
        from .names import build, derive
    except (ImportError, RuntimeError) as error:
        raise MachineError(
            t(pt="o diffusers instalado não conhece o Qwen-Image 2.1", en="the installed diffusers does not know Qwen-Image 2.1"),
            t(pt="atualize: pip install -U diffusers transformers (0.41 e 4.57, ou mais novos)",
              en="update: pip install -U diffusers transformers (0.41 and 4.57, or newer)"),
        ) from error  # fmt: skip
    return Transformer(build, derive)


FAMILY = QwenImage21
