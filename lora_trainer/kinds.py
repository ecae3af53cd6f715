"""What a file or folder is, told from the names and shapes of its tensors. Used to choose a family and to name
mistakes.

A kind is claimed only on evidence that no other kind has; whatever is left is "unknown", never a default family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .errors import t
from .headers import Header


class Kind(Enum):
    SD1 = "sd1"
    SD2 = "sd2"
    SDXL = "sdxl"
    SDXL_REFINER = "sdxl_refiner"
    INPAINTING = "inpainting"
    PIX2PIX = "pix2pix"
    DEPTH = "depth"
    UNCLIP = "unclip"
    FLUX = "flux"
    FLUX2 = "flux2"
    CHROMA = "chroma"
    SD3 = "sd3"
    DIT = "dit"
    LORA = "lora"
    CONTROLNET = "controlnet"
    EMBEDDING = "embedding"
    VAE = "vae"
    CLIP = "clip"
    T5 = "t5"
    LANGUAGE_MODEL = "language_model"
    UNET = "unet"
    UNKNOWN = "unknown"

    def title(self) -> str:
        """For people, with an article: "um LoRA"."""
        pt, en = _TITLES[self]
        return t(pt=pt, en=en)


_TITLES: dict[Kind, tuple[str, str]] = {
    Kind.SD1: ("um Stable Diffusion 1.x", "a Stable Diffusion 1.x"),
    Kind.SD2: ("um Stable Diffusion 2.x", "a Stable Diffusion 2.x"),
    Kind.SDXL: ("um SDXL", "an SDXL"),
    Kind.SDXL_REFINER: ("um SDXL refiner", "an SDXL refiner"),
    Kind.INPAINTING: ("um checkpoint de inpainting (9 canais)", "an inpainting checkpoint (9 channels)"),
    Kind.PIX2PIX: ("um checkpoint pix2pix (8 canais)", "a pix2pix checkpoint (8 channels)"),
    Kind.DEPTH: ("um checkpoint de profundidade (5 canais)", "a depth checkpoint (5 channels)"),
    Kind.UNCLIP: ("um Stable Diffusion unCLIP", "a Stable Diffusion unCLIP"),
    Kind.FLUX: ("um FLUX.1", "a FLUX.1"),
    Kind.FLUX2: ("um FLUX.2", "a FLUX.2"),
    Kind.CHROMA: ("um Chroma", "a Chroma"),
    Kind.SD3: ("um Stable Diffusion 3", "a Stable Diffusion 3"),
    Kind.DIT: ("um transformador de difusão (DiT)", "a diffusion transformer (DiT)"),
    Kind.LORA: ("um LoRA", "a LoRA"),
    Kind.CONTROLNET: ("um ControlNet", "a ControlNet"),
    Kind.EMBEDDING: ("um embedding (textual inversion)", "a textual inversion embedding"),
    Kind.VAE: ("um VAE", "a VAE"),
    Kind.CLIP: ("um codificador de texto CLIP", "a CLIP text encoder"),
    Kind.T5: ("um codificador de texto T5", "a T5 text encoder"),
    Kind.LANGUAGE_MODEL: ("um modelo de linguagem", "a language model"),
    Kind.UNET: ("só uma UNet, sem VAE nem codificador de texto", "a UNet alone, without VAE or text encoder"),
    Kind.UNKNOWN: ("nada que eu conheça", "nothing I know"),
}

UNET_PREFIXES = ("model.diffusion_model.", "state_dict.model.diffusion_model.", "diffusion_model.", "")
EMA_PREFIX = "model_ema."
BY_CHANNELS = {9: Kind.INPAINTING, 8: Kind.PIX2PIX, 5: Kind.DEPTH}


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
        number = 0
        while pattern.format(number) in self:
            number += 1
        return number


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


Test = Callable[[set[str], Header], bool]


def _ends(*endings: str) -> Test:
    return lambda names, _: any(name.endswith(endings) for name in names)


def _has(*fragments: str) -> Test:
    return lambda names, _: any(fragment in name for name in names for fragment in fragments)


_EARLY: tuple[tuple[Kind, Test], ...] = (
    (
        Kind.LORA,
        _ends(
            ".lora_down.weight",
            ".lora_up.weight",
            ".lora_A.weight",
            ".lora_B.weight",
            ".lora_A.default.weight",
            ".lora.down.weight",
            ".hada_w1_a",
            ".lokr_w1",
            ".lokr_w1_a",
            ".oft_blocks",
            ".lora_mid.weight",
        ),
    ),
    (Kind.CONTROLNET, _has("controlnet_cond_embedding.", "control_model.input_blocks.")),
    (Kind.EMBEDDING, lambda names, _: names <= {"emb_params", "clip_g", "clip_l", "t5xxl"} and bool(names)),
)
_LATE: tuple[tuple[Kind, Test], ...] = (
    (Kind.CHROMA, _has("distilled_guidance_layer.")),
    (Kind.FLUX2, _has("double_stream_modulation_img.")),
    (Kind.FLUX, _has("double_blocks.0.img_attn.", "single_transformer_blocks.0.")),
    (Kind.SD3, _has("joint_blocks.0.")),
    (Kind.DIT, _has("transformer_blocks.0.attn", "blocks.0.self_attn.", "blocks.0.cross_attn.", "noise_refiner.0.",
                    "double_layers.0.", "caption_projection.", "x_embedder.", "patch_embed.")),
    (Kind.UNET, _has("down_blocks.0.resnets.0.time_emb_proj.")),
    (Kind.VAE, lambda names, _: _has("decoder.conv_in.weight")(names, {}) and _has("encoder.conv_in.weight")(names,
    {})), (Kind.T5, _has("encoder.block.0.layer.0.SelfAttention.")), (Kind.CLIP,
    _has("embeddings.token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight")), (Kind.LANGUAGE_MODEL,
    _has("layers.0.self_attn.q_proj.", "layers.0.self_attn.qkv_proj.", "h.0.attn.c_attn.")), )  # fmt: skip


def classify(header: Header) -> Kind:
    """The kind of a single file."""
    names = set(header)
    for kind, test in _EARLY:
        if test(names, header):
            return kind
    if unet := find_unet(header):
        return _classify_unet(unet, names)
    return next((kind for kind, test in _LATE if test(names, header)), Kind.UNKNOWN)


def _classify_unet(unet: Part, names: set[str]) -> Kind:
    channels = (unet.shape("input_blocks.0.0.weight") or (0, 0))[1]
    if channels in BY_CHANNELS:
        return BY_CHANNELS[channels]
    start = wrapper(unet.header)

    def inside(*prefixes: str) -> bool:
        return any(name.startswith(start + prefix) for name in names for prefix in prefixes)

    labelled = "label_emb.0.0.weight" in unet
    if labelled and inside("conditioner.embedders.0.transformer.") and inside("conditioner.embedders.1.model."):
        return Kind.SDXL
    if labelled and inside("conditioner.embedders.0.model."):
        return Kind.SDXL_REFINER
    if labelled:
        return Kind.UNCLIP if inside("cond_stage_model.", "noise_augmentor.") else Kind.UNET
    if inside("cond_stage_model.model."):
        return Kind.SD2
    return Kind.SD1 if inside("cond_stage_model.transformer.") else Kind.UNET


_TRANSFORMERS = {
    "Flux2": Kind.FLUX2, "Flux": Kind.FLUX, "Chroma": Kind.CHROMA, "SD3": Kind.SD3, "StableDiffusion3": Kind.SD3,
}  # fmt: skip
"""Part of the names of diffusers' classes -> what they are."""


def classify_folder(config: Callable[[str], Mapping[str, Any] | None]) -> Kind:
    """The kind of a diffusers or transformers folder, from its config.json files (`config("")` is the root's)."""
    unet, index, root = config("unet"), config("model_index") or {}, config("") or {}
    pipeline = str(index.get("_class_name", ""))
    if unet:
        return _classify_unet_config(unet, index)
    alone = root if str(root.get("_class_name", "")).endswith("Transformer2DModel") else None
    if transformer := config("transformer") or alone:
        name = f"{pipeline} {transformer.get('_class_name', '')}"
        return next((kind for word, kind in _TRANSFORMERS.items() if word in name), Kind.DIT)
    if root.get("_class_name") in ("AutoencoderKL", "AutoencoderTiny") or (config("vae") and not pipeline):
        return Kind.VAE
    if root.get("_class_name") == "UNet2DConditionModel":
        return Kind.UNET
    if root.get("peft_type"):
        return Kind.LORA
    architecture = str((root.get("architectures") or [""])[0])
    model_type = str(root.get("model_type") or "")
    if model_type.startswith("clip"):
        return Kind.CLIP
    if "t5" in model_type:
        return Kind.T5
    if not architecture and model_type and "vocab_size" in root:  # the family knows whether transformers has the type
        return Kind.LANGUAGE_MODEL
    return Kind.LANGUAGE_MODEL if architecture.endswith("ForCausalLM") else Kind.UNKNOWN


def _classify_unet_config(unet: Mapping[str, Any], index: Mapping[str, Any]) -> Kind:
    channels = int(unet.get("in_channels", 4))
    if channels != 4:
        return BY_CHANNELS.get(channels, Kind.UNKNOWN)
    if unet.get("addition_embed_type") == "text_time":
        first = index.get("text_encoder") or [None, None]
        return Kind.SDXL_REFINER if index and first[1] is None else Kind.SDXL
    if unet.get("addition_embed_type") or unet.get("class_embed_type"):
        return Kind.UNCLIP
    if index and (index.get("text_encoder_2") or "Stable" not in str(index.get("_class_name", ""))):
        return Kind.UNKNOWN
    # Linear projections around the transformer blocks came with 2.0, as did OpenCLIP.
    return Kind.SD2 if unet.get("use_linear_projection") else Kind.SD1
