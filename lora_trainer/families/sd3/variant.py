"""Which files an SD3 base may be made of, and what may be taken for them."""

from dataclasses import replace

from ...bases import architecture, single_file
from ...bases.components import Networks
from ...bases.parts import CLIP_L, T5_XXL, VAE, Config, Slot
from ...bases.weights import Locate
from ...errors import SourceError, t
from ...files import kinds
from ...files.kinds import Part

FLUX_SCALING = 0.3611
"""Of another VAE with the same shapes."""


def _describe_clip_g(part: Part, standard: Config) -> tuple[Config, Locate]:
    config, locate = architecture.derive_clip(part, standard), single_file.locate_clip(part)
    projection = next((shape for name in ("", "transformer.") if (shape := part.shape(f"{name}text_projection.weight"))), None)
    return config | ({"projection_dim": projection[0]} if projection else {}), locate


CLIP_G = replace(
    CLIP_L, part="text_encoder_2", kind=kinds.CLIP_G, title="CLIP-G (clip_g.safetensors)",
    prefixes=("text_encoders.clip_g.",), describe=_describe_clip_g,
)  # fmt: skip
SLOTS: tuple[Slot, ...] = (
    CLIP_L, CLIP_G, replace(T5_XXL, part="text_encoder_3", optional=True), replace(VAE, title="VAE (sd3_vae.safetensors)")
)  # fmt: skip


def refuse_flux_vae(networks: Networks) -> None:
    """Its shapes are those of SD3's, its latents are not; only a config tells."""
    vae = networks.components["vae"]
    if abs(float(vae.config["scaling_factor"]) - FLUX_SCALING) < 1e-4:
        raise SourceError(
            t(pt="este VAE é o do FLUX: as formas são iguais às do SD3, os latentes não",
              en="this VAE is FLUX's: its shapes are those of SD3's, its latents are not"),
            t(pt="dê o VAE do SD3", en="give SD3's VAE"),
            vae.what,
        )  # fmt: skip


def without_t5() -> str:
    return t(
        pt="sem T5 (modelo.codificador_texto_3): só os dois CLIP leem as legendas, até 75 tokens de cada; o LoRA também "
        "funciona com o T5 na geração",
        en="without T5 (model.text_encoder_3): only the two CLIPs read captions, 75 tokens of each; the LoRA also works with "
        "T5 when making images",
    )
