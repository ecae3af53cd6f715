"""A tiny Qwen-Image 2.1 for tests. In its file gate and value of the MLP are one matrix, and the VAE's kernels a frame deep;
GGUF is as stable-diffusion.cpp writes it."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...bases.tiny import Encoder, Numbers, Tiny
from ...bases.weights import Locate
from . import names, vae

TRANSFORMER = {
    "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 2, "context_in_dim": 32, "axes_dims_rope": [4, 14, 14],
}  # fmt: skip
SYSTEM = "Comprehend and analyze the provided prompt."
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>\n{% endfor %}"


def locate_vae(config: Numbers) -> Locate:
    return vae.locate("", config["num_res_blocks"])


def stored_vae(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Kernels one frame deep, but for those that never looked at others."""

    def flat(name: str, value: Tensor) -> bool:
        return value.ndim != 4 or name.endswith("gamma") or any(part in name for part in ("to_qkv", "proj", ".resample."))

    return {name: value if flat(name, value) else value[:, :, None] for name, value in state.items()}


def draw_norm(modules: dict[str, Any]) -> None:
    """Its weights lie around 0."""
    nn.init.normal_(modules["transformer"].txt_in.text_norm.weight, std=0.1)


def pipeline_parts(folder: Path) -> dict[str, Any]:
    """A processor without its part for videos, which would want torchvision."""
    import transformers

    class Processor(transformers.Qwen3VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            super().__init__(image_processor, tokenizer, None, chat_template)

        def get_attributes(self) -> list[str]:
            return ["image_processor", "tokenizer"]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "processor")
    return {"processor": Processor(transformers.Qwen2VLImageProcessorPil(), tokenizer, CHAT)}


TINY = Tiny(
    pipeline="QwenImage21Pipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": {"base_dim": 4, "decoder_base_dim": 6},
        "text_encoder": Encoder(
            "qwen3_vl", "qwen3vl_8b", tokenizer="processor", tokenizer_class="Qwen3VLProcessor",
            texts=(SYSTEM,) * 4, special=VISION,
        ),
    },
    narrow={"num_layers": 4, "num_attention_heads": 2},
    gguf="qwen_image21",
    gguf_prefix="model.diffusion_model.",
    places=names.QWEN_21.places_of,
    locate_vae=locate_vae,
    stored_vae=stored_vae,
    vae_file="qwen_image_2.1_vae",
    finish=draw_norm,
    pipeline_parts=pipeline_parts,
)  # fmt: skip
