"""What a file or folder is, told from the names and shapes of its tensors. Used to choose a family and to name
mistakes.

A kind is claimed only on evidence that no other kind has; whatever is left is "unknown", never a default family.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import t
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
    CHROMA_RADIANCE = "chroma_radiance"
    SD3 = "sd3"
    Z_IMAGE = "z_image"
    LUMINA2 = "lumina2"
    QWEN_IMAGE = "qwen_image"
    QWEN_IMAGE_21 = "qwen_image_21"
    DIT = "dit"
    LORA = "lora"
    CONTROLNET = "controlnet"
    EMBEDDING = "embedding"
    VAE = "vae"
    VAE_QWEN = "vae_qwen"
    VAE_QWEN_21 = "vae_qwen_21"
    CLIP = "clip"
    CLIP_G = "clip_g"
    T5 = "t5"
    LANGUAGE_MODEL = "language_model"
    VISION_LANGUAGE = "vision_language"
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
    Kind.CHROMA_RADIANCE: ("um Chroma1-Radiance, que desenha pixels", "a Chroma1-Radiance, which draws pixels"),
    Kind.SD3: ("um Stable Diffusion 3", "a Stable Diffusion 3"),
    Kind.Z_IMAGE: ("um Z-Image", "a Z-Image"),
    Kind.LUMINA2: ("um Lumina 2", "a Lumina 2"),
    Kind.QWEN_IMAGE: ("um Qwen-Image", "a Qwen-Image"),
    Kind.QWEN_IMAGE_21: ("um Qwen-Image 2.1", "a Qwen-Image 2.1"),
    Kind.DIT: ("um transformador de difusão (DiT)", "a diffusion transformer (DiT)"),
    Kind.LORA: ("um LoRA", "a LoRA"),
    Kind.CONTROLNET: ("um ControlNet", "a ControlNet"),
    Kind.EMBEDDING: ("um embedding (textual inversion)", "a textual inversion embedding"),
    Kind.VAE: ("um VAE", "a VAE"),
    Kind.VAE_QWEN: ("um VAE do Qwen-Image ou do Wan", "a VAE of Qwen-Image or Wan"),
    Kind.VAE_QWEN_21: ("um VAE do Qwen-Image 2.1 ou do Wan 2.2", "a VAE of Qwen-Image 2.1 or Wan 2.2"),
    Kind.CLIP: ("um codificador de texto CLIP", "a CLIP text encoder"),
    Kind.CLIP_G: ("um codificador de texto CLIP-G", "a CLIP-G text encoder"),
    Kind.T5: ("um codificador de texto T5", "a T5 text encoder"),
    Kind.LANGUAGE_MODEL: ("um modelo de linguagem", "a language model"),
    Kind.VISION_LANGUAGE: ("um modelo de linguagem com visão", "a vision language model"),
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
_qwen = _has("transformer_blocks.0.img_mod.1.")
_CLIP = _has("embeddings.token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight")


def _deep_clip(names: set[str], _: Header) -> bool:
    """CLIP-L has 12 layers; its image tower, where a file has both, is deeper."""
    text = {name for name in names if "vision" not in name and "visual" not in name}
    return _CLIP(names, {}) and _has("encoder.layers.12.", "transformer.resblocks.12.")(text, {})


def _sd3(names: set[str], _: Header) -> bool:
    """In the original, or with the names of diffusers; AuraFlow has such a position table too, and ControlNets."""
    diffusers = {"pos_embed.pos_embed", "time_text_embed.text_embedder.linear_1.weight", "context_embedder.weight"}
    if any("joint_blocks.0." in name for name in names):
        return True
    return diffusers <= names and not any(name.startswith("controlnet_blocks.") for name in names)


def _language(names: set[str]) -> bool:
    """Nothing but a language model, as ComfyUI's text encoders are, with or without its vision tower."""
    inside = any("layers.0.mlp.gate_proj." in name for name in names)
    return inside and not any(name.startswith("model.diffusion_model.") for name in names)


def _next_dit(names: set[str], header: Header) -> bool:
    """What Z-Image and Lumina 2 have in common; Z-Image has tokens for padding besides."""
    return _has("noise_refiner.0.")(names, header) and _has("cap_embedder.0.", ".caption_embedder.0.")(names, header)


_LATE: tuple[tuple[Kind, Test], ...] = (
    (Kind.Z_IMAGE, lambda names, header: _next_dit(names, header) and _ends("cap_pad_token")(names, header)),
    (Kind.LUMINA2, lambda names, header: _next_dit(names, header) and not _has("ref_image_")(names, header)),
    (Kind.CHROMA_RADIANCE, _has("nerf_blocks.", "img_in_patch.")),
    (Kind.CHROMA, _has("distilled_guidance_layer.")),
    (Kind.FLUX2, _has("double_stream_modulation_img.")),
    (Kind.FLUX, _has("double_blocks.0.img_attn.", "single_transformer_blocks.0.")),
    (Kind.SD3, _sd3),
    (Kind.CONTROLNET, lambda names, header: _qwen(names, header) and _has("controlnet_blocks.")(names, header)),
    (Kind.QWEN_IMAGE, _qwen),
    (Kind.QWEN_IMAGE_21, _has("txt_in.text_norm.weight")),
    (Kind.VISION_LANGUAGE, lambda names, header: _language(names) and _has("visual.", "vision_tower.")(names, header)),
    (Kind.LANGUAGE_MODEL, lambda names, _: _language(names)),
    (Kind.DIT, _has("transformer_blocks.0.attn", "blocks.0.self_attn.", "blocks.0.cross_attn.", "noise_refiner.0.",
                    "double_layers.0.", "caption_projection.", "x_embedder.", "patch_embed.")),
    (Kind.UNET, _has("down_blocks.0.resnets.0.time_emb_proj.")),
    (Kind.VAE_QWEN_21, _has("encoder.downsamples.0.downsamples.0.", "encoder.down_blocks.0.resnets.0.norm1.gamma")),
    (Kind.VAE_QWEN, _has("encoder.downsamples.0.residual.0.gamma", "encoder.mid_block.resnets.0.norm1.gamma")),
    (Kind.VAE, lambda names, _: _has("decoder.conv_in.weight")(names, {}) and _has("encoder.conv_in.weight")(names,
    {})), (Kind.T5, _has("encoder.block.0.layer.0.SelfAttention.")), (Kind.CLIP_G, _deep_clip), (Kind.CLIP, _CLIP),
    (Kind.LANGUAGE_MODEL,
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


VISION_LANGUAGE_TYPES = ("qwen2_5_vl", "qwen3_vl", "mistral3")
_TRANSFORMERS = {
    "Flux2": Kind.FLUX2, "Flux": Kind.FLUX, "Chroma": Kind.CHROMA, "SD3": Kind.SD3, "StableDiffusion3": Kind.SD3,
    "ZImage": Kind.Z_IMAGE, "Lumina2": Kind.LUMINA2,
    "QwenImage21": Kind.QWEN_IMAGE_21, "QwenImage": Kind.QWEN_IMAGE,
}  # fmt: skip
"""Part of the names of diffusers' classes -> what they are."""
_QWEN_VAES = {"AutoencoderKLQwenImage": Kind.VAE_QWEN, "AutoencoderKLQwenImage21": Kind.VAE_QWEN_21}


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
    vae_class = root.get("_class_name") or (config("vae") or {}).get("_class_name")
    if vae_class in _QWEN_VAES and not pipeline:
        return _QWEN_VAES[vae_class]
    if root.get("_class_name") in ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny") or (config("vae") and not pipeline):
        return Kind.VAE
    if root.get("_class_name") == "UNet2DConditionModel":
        return Kind.UNET
    if root.get("peft_type"):
        return Kind.LORA
    if root.get("vision_config") and root.get("model_type") in VISION_LANGUAGE_TYPES:
        return Kind.VISION_LANGUAGE
    architecture = str((root.get("architectures") or [""])[0])
    model_type = str(root.get("model_type") or "")
    if model_type.startswith("clip"):
        text = root.get("text_config") or root
        return Kind.CLIP_G if int(text.get("num_hidden_layers", 12)) > 12 else Kind.CLIP
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
