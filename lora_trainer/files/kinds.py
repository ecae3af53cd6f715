"""What a file or folder may be: the kinds that belong to no family, and where families say theirs.

What bases of a family look like stands in `families/<name>/signature.py`, which is read by its name; classify.py asks for it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .. import plugins
from ..errors import t
from .headers import Header

FAMILIES = "lora_trainer.families"
FileTest = Callable[[Header], bool]
FolderTest = Callable[[Any], bool]
"""Of a classify.Folder."""


@dataclass(frozen=True)
class Words:
    """A text that is said later, in the language then in force."""

    pt: str
    en: str

    def __str__(self) -> str:
        return t(pt=self.pt, en=self.en)


@dataclass(frozen=True, eq=False)
class Kind:
    name: str
    pt: str
    """For people, with an article: "um LoRA"."""
    en: str
    way_out: Words | None = None
    """What to do where a base was expected."""
    file: FileTest = field(default=lambda header: False, repr=False)
    """Of the kinds that families bring: whether a single file is it."""
    folder: FolderTest = field(default=lambda folder: False, repr=False)
    before: tuple[str, ...] = ()
    """Kinds whose tests hold for it too, so that it is asked for before them."""
    part: bool = False
    """Of a model; files that hold a whole one are never it."""
    in_gguf: bool = False
    """Told by its tensors in GGUF files too."""

    def title(self) -> str:
        return t(pt=self.pt, en=self.en)


@dataclass(frozen=True)
class Signature:
    """What is known of a family without torch."""

    bases: tuple[Kind, ...]
    """What it trains."""
    others: tuple[Kind, ...] = ()
    """What else only it knows: a VAE of its own, kin that cannot be trained."""
    caption_tokens: tuple[int, ...] = (75, 150, 225)
    """What `dados.maximo_tokens` may be, besides auto."""


@cache
def signatures() -> dict[str, Signature]:
    """Of all families, by their names."""
    return {name: plugins.load(f"{FAMILIES}.{name}", "signature").SIGNATURE for name in plugins.available(FAMILIES)}


def family_of(kind: Kind) -> str | None:
    """The family that trains such bases."""
    return next((name for name, signature in signatures().items() if kind in signature.bases), None)


# -- what is no family

_ORDINARY = Words(
    pt="use o modelo base comum (4 canais) de que ele foi feito; o LoRA também funciona na variante",
    en="use the ordinary base (4 channels) it was made from; the LoRA works on the variant as well",
)
IN_VAE = Words(
    pt="ponha em modelo_base o modelo completo; este arquivo cabe em modelo.vae",
    en="put the full model in base_model; this file belongs in model.vae",
)
_IN_TEXT = Words(
    pt="ponha em modelo_base o modelo que gera imagens; este arquivo cabe em modelo.codificador_texto ou codificador_texto_2",
    en="put the model that makes images in base_model; this file belongs in model.text_encoder or text_encoder_2",
)
INPAINTING = Kind(
    "inpainting", "um checkpoint de inpainting (9 canais)", "an inpainting checkpoint (9 channels)", _ORDINARY
)
PIX2PIX = Kind("pix2pix", "um checkpoint pix2pix (8 canais)", "a pix2pix checkpoint (8 channels)", _ORDINARY)
DEPTH = Kind("depth", "um checkpoint de profundidade (5 canais)", "a depth checkpoint (5 channels)", _ORDINARY)
UNCLIP = Kind("unclip", "um Stable Diffusion unCLIP", "a Stable Diffusion unCLIP", _ORDINARY)
SDXL_REFINER = Kind(
    "sdxl_refiner", "um SDXL refiner", "an SDXL refiner",
    Words(
        pt="use o SDXL base; o refiner é só para a geração de imagens",
        en="use the SDXL base; the refiner is for making images only",
    ),
)  # fmt: skip
UNET = Kind(
    "unet", "só uma UNet, sem VAE nem codificador de texto", "a UNet alone, without VAE or text encoder",
    Words(
        pt="use o checkpoint completo (com VAE e codificador de texto) ou a pasta do diffusers",
        en="use the full checkpoint (with VAE and text encoder) or the diffusers folder",
    ),
)  # fmt: skip
LUMINA2 = Kind("lumina2", "um Lumina 2", "a Lumina 2", in_gguf=True)
DIT = Kind("dit", "um transformador de difusão (DiT)", "a diffusion transformer (DiT)", in_gguf=True)
LORA = Kind(
    "lora", "um LoRA", "a LoRA",
    Words(
        pt="ponha em modelo_base o modelo completo; para continuar um LoRA, use modelo.lora_inicial",
        en="put the full model in base_model; to continue a LoRA, use model.initial_lora",
    ),
)  # fmt: skip
CONTROLNET = Kind("controlnet", "um ControlNet", "a ControlNet")
EMBEDDING = Kind("embedding", "um embedding (textual inversion)", "a textual inversion embedding")
VAE = Kind("vae", "um VAE", "a VAE", IN_VAE)
CLIP = Kind("clip", "um codificador de texto CLIP", "a CLIP text encoder", _IN_TEXT)
CLIP_G = Kind("clip_g", "um codificador de texto CLIP-G", "a CLIP-G text encoder", _IN_TEXT)
T5 = Kind("t5", "um codificador de texto T5", "a T5 text encoder", _IN_TEXT)
LANGUAGE_MODEL = Kind("language_model", "um modelo de linguagem", "a language model")
VISION_LANGUAGE = Kind(
    "vision_language", "um modelo de linguagem com visão", "a vision language model",
    Words(
        pt="ponha em modelo_base o modelo que gera imagens, ou um modelo de linguagem sem visão (…ForCausalLM); este cabe em "
        "modelo.codificador_texto",
        en="put the model that makes images in base_model, or a language model without vision (…ForCausalLM); this one "
        "belongs in model.text_encoder",
    ),
)  # fmt: skip
UNKNOWN = Kind("unknown", "nada que eu conheça", "nothing I know")

UNET_PREFIXES = ("model.diffusion_model.", "state_dict.model.diffusion_model.", "diffusion_model.", "")
EMA_PREFIX = "model_ema."
BY_CHANNELS = {9: INPAINTING, 8: PIX2PIX, 5: DEPTH}


# -- parts of a single file


@dataclass(frozen=True)
class Part:
    """One component inside a single file: knows how its names are spelled there.

    `squashed` is the spelling of ldm's averaged copy (LitEma): the dots of the name are left out.
    """

    header: Header
    prefix: str
    squashed: bool = False

    def key(self, name: str) -> str:
        if not self.squashed:
            return self.prefix + name
        return EMA_PREFIX + (self.prefix.removeprefix("model.") + name).replace(".", "")

    def shape(self, name: str) -> tuple[int, ...] | None:
        info = self.header.get(self.key(name))
        return info.shape if info else None

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.header

    def count(self, pattern: str) -> int:
        """How many of pattern.format(0), pattern.format(1), … are there without a gap."""
        return next(number for number in itertools.count() if pattern.format(number) not in self)


def find_part(header: Header, name: str) -> Part | None:
    """The component that has the tensor `name`, whatever its names begin with in this file: the longest such start, which is
    ComfyUI's where a file has several."""
    starts = [key.removesuffix(name) for key in header if key == name or key.endswith(f".{name}")]
    return Part(header, max(starts, key=len)) if starts else None


def find_unet(header: Header) -> Part | None:
    """The UNet in the original layout, the averaged copy only where there is no other."""
    for prefix in UNET_PREFIXES:
        for squashed in (False, True):
            part = Part(header, prefix, squashed)
            if "input_blocks.0.0.weight" in part and (not squashed or prefix == UNET_PREFIXES[0]):
                return part
    return None


def wrapper(header: Header) -> str:
    """ "state_dict." where a whole Lightning checkpoint was converted, else ""."""
    return "state_dict." if any(name.startswith("state_dict.model.") for name in header) else ""
