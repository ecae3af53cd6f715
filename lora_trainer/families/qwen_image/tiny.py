"""A tiny Qwen-Image for tests."""

from ...bases.tiny import Encoder, Numbers, Tiny
from ...bases.weights import Locate
from . import vae

TRANSFORMER = {
    "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 2, "joint_attention_dim": 32,
    "axes_dims_rope": [4, 14, 14],
}  # fmt: skip
VAE = {"base_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
"""diffusers' converter knows no other number of blocks."""


def locate_vae(config: Numbers) -> Locate:
    return vae.locate("", config["num_res_blocks"])


TINY = Tiny(
    pipeline="QwenImagePipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": VAE,
        "text_encoder": Encoder("qwen2_5_vl", "qwen_2.5_vl_7b", inside="qwen25_7b"),
    },
    narrow={"num_layers": 4, "num_attention_heads": 3},
    gguf="qwen_image",
    locate_vae=locate_vae,
    vae_file="qwen_image_vae",
)
