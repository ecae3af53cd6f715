"""Which Z-Image a base is: the weights' shapes are the same, so only what lies beside them, or a name, can tell.

Turbo is drawn in 8 steps without guidance, and trained only with what keeps its distillation.
"""

import re
from dataclasses import dataclass

from ...bases import architecture as _architecture
from ...bases.components import Networks
from ...config.schema import ModelConfig
from ...errors import SourceError, t
from ...files.sources import Source

TURBO_SHIFT, TURBO_STEPS = 3.0, 8
_UNDONE = r"de[-_ .]?turbo|de[-_ .]?distill|undistill"


@dataclass(frozen=True)
class Variant:
    turbo: bool
    shift: float | None = None
    """Where the shipped scheduler, the base's, is not it."""
    notice: str = ""


def variant_of(source: Source, settings: ModelConfig) -> Variant:
    """By the scheduler that came with it (3 for Turbo, 6 for the base); else by what it calls itself: weights do not tell."""
    scheduler = _architecture.given(settings.architecture, "scheduler") or source.config("scheduler")
    metadata = source.gguf.metadata if source.gguf else source.metadata
    told = [str(value) for key, value in metadata.items() if key.startswith(("modelspec.", "general."))]
    called = " ".join([source.hub_id or source.path.name, *told]).lower()
    if re.search(_UNDONE, called):
        return Variant(turbo=False, shift=None if scheduler else TURBO_SHIFT)
    if scheduler:
        return Variant(turbo=float(scheduler.get("shift", 1.0)) < 1.5 * TURBO_SHIFT)
    if "turbo" in called:
        return Variant(turbo=True, shift=TURBO_SHIFT)
    return Variant(turbo=False, notice="" if source.planning or "base" in called else _untold_notice(source))


def _untold_notice(source: Source) -> str:
    return t(
        pt=f"{source.title()} não diz se é o Z-Image base ou o Turbo: fica como base. Se for o Turbo, diga-o no nome do "
        "arquivo (…turbo…) e use modelo.lora_de_treino",
        en=f"{source.title()} does not tell whether it is the Z-Image base or Turbo: it is taken for the base. If it is Turbo, "
        "say so in the file's name (…turbo…) and use model.training_lora",
    )


def turbo_notice() -> str:
    return t(
        pt="o modelo base é um Z-Image Turbo, destilado para 8 passos: treinar nele desfaz a destilação. Treine no Z-Image base "
        "(o LoRA também funciona no Turbo), ou indique em modelo.lora_de_treino o adaptador de treino do Turbo "
        "(zimage_turbo_training_adapter_v2.safetensors)",
        en="the base is a Z-Image Turbo, distilled to 8 steps: training on it undoes the distillation. Train on the Z-Image base "
        "(the LoRA works on Turbo too), or name Turbo's training adapter in model.training_lora "
        "(zimage_turbo_training_adapter_v2.safetensors)",
    )


def refuse_omni(networks: Networks, source: Source) -> None:
    if networks.components["transformer"].config.get("siglip_feat_dim"):
        raise SourceError.said(
            pt=f"{source.title()} é um Z-Image Omni ou Edit, que também lê imagens",
            en=f"{source.title()} is a Z-Image Omni or Edit, which reads pictures too",
            hint_pt="use o Z-Image base ou o Turbo",
            hint_en="use the Z-Image base or Turbo",
            where=source.what,
        )
