"""A tiny FLUX.2 for tests: klein, base or distilled, with a Qwen3 of 28 layers, and dev with a Mistral of 31."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ...bases.tiny import Encoder, Tiny
from ...files.kinds import Part
from . import names, vae

TRANSFORMER = {
    "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2,
    "joint_attention_dim": 96, "axes_dims_rope": [8] * 4,
}  # fmt: skip


def draw_statistics(modules: dict[str, Any]) -> None:
    """Which are no parameters."""
    nn.init.normal_(modules["vae"].bn.running_mean, std=0.1)
    nn.init.uniform_(modules["vae"].bn.running_var, 0.5, 2.0)


TINY = Tiny(
    pipeline="Flux2KleinPipeline",
    parts={
        "transformer": TRANSFORMER,
        "vae": {"block_out_channels": [32] * 4, "layers_per_block": 1},
        "text_encoder": Encoder("qwen3", "text", {"layers": 28}, inside="qwen3_4b"),
    },
    narrow={"num_layers": 3, "num_single_layers": 4, "num_attention_heads": 2},
    gguf="flux",
    places=names.FLUX2.places_of,
    locate_vae=partial(vae.locate_original, Part({}, "")),
    vae_file="flux2-vae",
    finish=draw_statistics,
)
MISTRAL = Encoder("mistral", "text", {"layers": 31})
VARIANTS = {
    "distilled": replace(TINY, index={"is_distilled": True}),
    "dev": replace(TINY, pipeline="Flux2Pipeline", release="flux2_dev", parts={**TINY.parts, "text_encoder": MISTRAL}),
}
