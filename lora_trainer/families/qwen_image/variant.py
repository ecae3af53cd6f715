"""What a base may be that looks like a Qwen-Image: one that draws from other pictures."""

from ...bases.components import Networks
from ...errors import SourceError
from ...files.sources import Source

EDIT_PIPELINES = ("Edit", "Layered", "ControlNet", "Inpaint")


def refuse_variants(networks: Networks, source: Source) -> None:
    """Which look alike but for a flag; an Edit of 2025 can only be told by its folder."""
    config = networks.components["transformer"].config
    pipeline = str((source.config("model_index") or {}).get("_class_name", ""))
    flags = ("zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
    if any(word in pipeline for word in EDIT_PIPELINES) or any(config.get(flag) for flag in flags):
        name = pipeline.removesuffix("Pipeline") or "Qwen-Image-Edit / Layered"
        raise SourceError.said(
            pt=f"{source.title()} é um {name}, que desenha a partir de outras imagens",
            en=f"{source.title()} is a {name}, which draws from other pictures",
            hint_pt="treine no Qwen-Image ou no Qwen-Image-2512; o LoRA costuma funcionar também no Edit",
            hint_en="train on Qwen-Image or Qwen-Image-2512; the LoRA mostly works on Edit as well",
            where=source.what,
        )
