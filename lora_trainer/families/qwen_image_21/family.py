"""Qwen-Image 2.1 (Qwen team 2026): text to image with the base, Turbo, and fine-tunes of either.

A latent pixel is a token, and stands for 16 x 16 of the picture. Qwen3-VL reads the caption inside a template; what its last
layer makes of it, before the final norm, is what the transformer sees, without the system's turn. Guidance is distilled into
the weights: previews have none unless asked. All as diffusers' QwenImage21Pipeline does it. Left out: pictures as a condition.
"""

from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from ...bases import architecture
from ...bases.components import Networks
from ...bases.llm_tokenizers import QWEN3_VL_PLACES, find_llm_tokenizer
from ...bases.parts import Transformer
from ...config.schema import ModelConfig
from ...diffusion import llm_text
from ...diffusion.captions import LanguageModel, count_tokens
from ...diffusion.prompts import MASK
from ...diffusion.transformer import Fit, TransformerFamily, targets
from ...errors import MachineError, t
from ...files.sources import Source
from ...seam.family import Batch
from ...seam.readers import KOHYA_WITHOUT_DIFFUSERS
from ...seam.slots import Slot, flat
from . import vae
from .variant import refuse_unknown, tower_notice, turbo_levels, turbo_notice

TOKENS = 512
SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
USER, AFTER = "<|im_start|>user\n{}", "<|im_end|>\n<|im_start|>assistant\n"
DROPPED = 14
"""Tokens of SYSTEM in the released vocabulary."""
LAYER = -1
QWEN3_VL = llm_text.language_slot(
    "text_encoder", "qwen3_vl", "Qwen3-VL-8B (qwen3vl_8b_bf16.safetensors)", (LAYER,),
    ("text_encoders.qwen3vl_8b.transformer.", "text_encoders.qwen3vl_8b."), normed=False,
)  # fmt: skip
UNSHIFTED = {"use_dynamic_shifting": False, "shift": 1.0, "shift_terminal": None}


def _names() -> Any:
    """The module of the transformer, which not every diffusers has."""
    try:
        return import_module(".names", __package__)
    except (ImportError, RuntimeError) as error:
        raise MachineError(
            t(pt="o diffusers instalado não conhece o Qwen-Image 2.1", en="the installed diffusers does not know Qwen-Image 2.1"),
            t(pt="atualize: pip install -U diffusers transformers (0.41 e 4.57, ou mais novos)",
              en="update: pip install -U diffusers transformers (0.41 and 4.57, or newer)"),
        ) from error  # fmt: skip


class QwenImage21(TransformerFamily):
    name = "qwen_image_21"
    title = "Qwen-Image 2.1"
    pipeline = "QwenImage21Pipeline"
    model_spec, base_version = "qwen-image-2.1", "qwen_image_21"
    masked = True
    text_width = "context_in_dim"
    side_multiple = 32
    usual_guidance = 1.0
    formats = KOHYA_WITHOUT_DIFFUSERS  # diffusers' reader knows the first Qwen-Image's layers only
    patch = 1
    training_shift = "resolution"
    network = Transformer(
        lambda config: _names().build(config), lambda header, standard: _names().derive(header, standard)
    )
    slots = (QWEN3_VL, vae.QWEN_21_VAE)
    fits = (Fit("text_encoder", "hidden_size", "context_in_dim"), Fit("vae", "z_dim", "in_channels"))
    latents = vae.LATENTS
    block_lists: ClassVar = {"blocks": "transformer_blocks"}
    lora_targets: ClassVar = targets(
        r"transformer\.transformer_blocks\.\d+", r"attn\.(?:to_[qkv]|to_out\.0)", r"img_mlp\.(?:gate_layer|proj|out)"
    )

    def __init__(self, source: Source, settings: ModelConfig, networks: Networks, tokens: int | None) -> None:
        refuse_unknown(networks.components, source)
        super().__init__(source, settings, networks, tokens)
        self.latent_facts = ()
        self.places = _names().QWEN_21.places_of(self.config)
        self.notices += tower_notice(self.components["text_encoder"])
        self.levels = turbo_levels(source)
        if self.levels:
            self.usual_steps = len(self.levels)
            self.schedule_config = {**architecture.shipped(self.name, "scheduler"), **UNSHIFTED}
            self.notices += [] if settings.training_lora else [turbo_notice(self.usual_steps)]

    def open_reader(self, networks: Networks, tokens: int | None) -> LanguageModel:
        tokenizer = find_llm_tokenizer(self.source, self.settings.tokenizer, "processor", QWEN3_VL_PLACES, "Qwen3-VL")
        return LanguageModel(
            tokenizer, tokens or TOKENS, (SYSTEM, USER, AFTER), LAYER,
            dropped=count_tokens(tokenizer, SYSTEM) or DROPPED, kept=count_tokens(tokenizer, AFTER),
            empty=" ", around=(USER.format(""), AFTER),
        )  # fmt: skip

    def answer(self, transformer: Any, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        dtype, size = transformer.img_in.weight.dtype, tuple(x_t.shape[-2:])
        text, mask = batch["prompt_embeds"].to(dtype), batch.get(MASK)
        tokens = x_t.to(dtype).flatten(2).transpose(1, 2)
        predicted: Tensor = transformer(tokens, timesteps.to(dtype) / 1000, text, mask, size)
        return predicted.transpose(1, 2).unflatten(2, size)

    def kohya_slots(self, path: str) -> Slot:
        """As ComfyUI and musubi-tuner have it, whose gate and value are one matrix."""
        layer = path.removeprefix("transformer.")
        return self.places.slot(layer, self.width * int(self.config["mlp_ratio"])) or Slot(flat(layer))


FAMILY = QwenImage21
