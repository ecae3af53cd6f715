"""Why a base cannot be trained, said from what it is: each kind with its own way out."""

from .. import plugins
from ..errors import SourceError, t
from ..files.kinds import Kind
from ..files.sources import Source


def refusal(source: Source) -> SourceError:
    """The error for a source that no family recognises."""
    kind, name = source.looks_like(), source.title()
    if kind is Kind.UNKNOWN:
        problem = t(
            pt=f"não reconheço o modelo {name}: os tensores dele não são de nenhuma família que eu treine",
            en=f"{name} is not recognised: its tensors are of no family that can be trained here",
        )
    else:
        problem = t(
            pt=f"{name} é {kind.title()}, que não serve de modelo base",
            en=f"{name} is {kind.title()}, no use as a base",
        )
    return SourceError(problem, _way_out(kind), source.what)


def _way_out(kind: Kind) -> str:
    variants = (Kind.INPAINTING, Kind.PIX2PIX, Kind.DEPTH, Kind.UNCLIP)
    if kind in variants:
        return t(
            pt="use o modelo base comum (4 canais) de que ele foi feito; o LoRA também funciona na variante",
            en="use the ordinary base (4 channels) it was made from; the LoRA works on the variant as well",
        )
    if kind is Kind.SDXL_REFINER:
        return t(
            pt="use o SDXL base; o refiner é só para a geração de imagens",
            en="use the SDXL base; the refiner is for making images only",
        )
    if kind is Kind.LORA:
        return t(
            pt="ponha em modelo_base o modelo completo; para continuar um LoRA, use modelo.lora_inicial",
            en="put the full model in base_model; to continue a LoRA, use model.initial_lora",
        )
    if kind in (Kind.VAE, Kind.VAE_QWEN, Kind.VAE_QWEN_21):
        return t(
            pt="ponha em modelo_base o modelo completo; este arquivo cabe em modelo.vae",
            en="put the full model in base_model; this file belongs in model.vae",
        )
    if kind in (Kind.CLIP, Kind.CLIP_G, Kind.T5):
        return t(
            pt="ponha em modelo_base o modelo que gera imagens; este arquivo cabe em modelo.codificador_texto ou "
            "codificador_texto_2",
            en="put the model that makes images in base_model; this file belongs in model.text_encoder or text_encoder_2",
        )
    if kind is Kind.VISION_LANGUAGE:
        return t(
            pt="ponha em modelo_base o modelo que gera imagens, ou um modelo de linguagem sem visão (…ForCausalLM); este cabe em "
            "modelo.codificador_texto",
            en="put the model that makes images in base_model, or a language model without vision (…ForCausalLM); this one "
            "belongs in model.text_encoder",
        )
    if kind is Kind.CHROMA_RADIANCE:
        return t(
            pt="use o Chroma1-HD ou o Chroma1-Base, que desenham com o VAE do FLUX.1",
            en="use Chroma1-HD or Chroma1-Base, which draw with FLUX.1's VAE",
        )
    if kind is Kind.UNET:
        return t(
            pt="use o checkpoint completo (com VAE e codificador de texto) ou a pasta do diffusers",
            en="use the full checkpoint (with VAE and text encoder) or the diffusers folder",
        )
    families = "lora_trainer.families"
    titles = [plugins.load(f"{families}.{name}", "family").FAMILY.title for name in plugins.available(families)]
    known = ", ".join(titles)
    return t(pt=f"o que se treina aqui: {known}", en=f"what can be trained here: {known}")
