"""Which FLUX.1 a base is: schnell is distilled to few steps; Fill, Depth and Canny read a picture too."""

from ...bases.components import Networks
from ...diffusion.packing import PATCH
from ...errors import SourceError, t
from ...files.sources import Source


def refuse_controls(networks: Networks, source: Source) -> None:
    config = networks.components["transformer"].config
    has, takes = int(config["in_channels"]), int(networks.components["vae"].config["latent_channels"]) * PATCH**2
    if (has > takes and has % takes == 0) or has == 384:
        raise SourceError.said(
            pt=f"{source.title()} é um FLUX.1 Fill, Depth ou Canny ({has} canais de entrada)",
            en=f"{source.title()} is a FLUX.1 Fill, Depth or Canny ({has} input channels)",
            hint_pt="use o FLUX.1 dev de que ele foi feito; o LoRA também funciona na variante",
            hint_en="use the FLUX.1 dev it was made from; the LoRA works on the variant as well",
            where=source.what,
        )


def schnell_notice() -> str:
    return t(
        pt="o modelo base é um FLUX.1 schnell, destilado para 4 passos: treinar nele desfaz aos poucos a destilação; treine "
        "no FLUX.1 dev (o LoRA também funciona no schnell), ou prefira poucos passos e taxa baixa",
        en="the base is a FLUX.1 schnell, distilled to 4 steps: training on it undoes the distillation bit by bit; train on "
        "FLUX.1 dev (the LoRA works on schnell too), or prefer few steps and a low rate",
    )
