"""What a Qwen-Image 2.1 base is, and what it may be taken for.

Turbo's weights have the base's shapes; the noise levels that come with it tell, or its name. It is drawn in 8 steps, and
trained only with what keeps its distillation. Qwen3-8B has the shapes of Qwen3-VL-8B's text part, but other weights.
"""

import re
from collections.abc import Mapping

from ...bases.component import Component
from ...bases.stored import GgufWeights
from ...diffusion import llm_text
from ...errors import SourceError, t
from ...files.sources import Source

TURBO_LEVELS = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)


def turbo_levels(source: Source) -> tuple[float, ...] | None:
    """Noise of each of its steps; None for the base. A single file has its name alone to tell."""
    index = source.config("model_index")
    if index is not None:
        return tuple(float(level) for level in index.get("sample_sigmas") or ()) or None
    return TURBO_LEVELS if re.search("turbo", source.hub_id or source.path.name, re.IGNORECASE) else None


def turbo_notice(steps: int) -> str:
    return t(
        pt=f"o modelo base é um Qwen-Image 2.1 Turbo, destilado para {steps} passos: treinar nele desfaz a destilação. Treine no "
        "Qwen-Image 2.1 (o LoRA costuma funcionar também no Turbo), ou indique em modelo.lora_de_treino um adaptador de treino",
        en=f"the base is a Qwen-Image 2.1 Turbo, distilled to {steps} steps: training on it undoes the distillation. Train on "
        "Qwen-Image 2.1 (the LoRA mostly works on Turbo as well), or name a training adapter in model.training_lora",
    )


def refuse_unknown(components: Mapping[str, Component], source: Source) -> None:
    config, encoder = components["transformer"].config, components["text_encoder"]
    if int(config.get("patch_size", 1)) != 1 or not config.get("causal_condition", True):
        raise SourceError.said(
            pt=f"{source.title()} é uma variante do Qwen-Image 2.1 que não conheço",
            en=f"{source.title()} is a variant of Qwen-Image 2.1 that is not known here",
            hint_pt="use o Qwen-Image 2.1 publicado",
            hint_en="use Qwen-Image 2.1 as published",
            where=source.what,
        )
    if isinstance(encoder.weights, GgufWeights) and encoder.weights.file.architecture == "qwen3":
        raise llm_text.another("Qwen3", "Qwen3-VL", encoder.what)


def tower_notice(encoder: Component) -> list[str]:
    """Without its vision tower, which a GGUF never has, nothing tells the one model from the other."""
    header = encoder.weights.header
    if not header or isinstance(encoder.weights, GgufWeights) or any("visual." in key for key in header):
        return []
    return [
        t(
            pt=f"{encoder.what}: o arquivo não traz a torre de visão do Qwen3-VL; confira se não é o Qwen3-8B, que tem o mesmo "
            "formato e outros pesos",
            en=f"{encoder.what}: the file lacks Qwen3-VL's vision tower; make sure that it is not Qwen3-8B, which has the same "
            "shapes and other weights",
        )
    ]
