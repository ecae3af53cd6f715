"""What a file or folder is, told from the names and shapes of its tensors. Used to choose a family and to name
mistakes.

A kind is claimed only on evidence that no other kind has; whatever is left is "unknown", never a default family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from typing import Any

from . import kinds
from .headers import Header
from .kinds import FileTest, FolderTest, Kind, find_unet, signatures, wrapper

# -- tests of a single file


def ends(*endings: str) -> FileTest:
    """Whether any name ends in one of them."""
    return lambda header: any(name.endswith(endings) for name in header)


def has(*fragments: str) -> FileTest:
    """Whether one of them is in any name."""
    return lambda header: any(fragment in name for name in header for fragment in fragments)


def every(*tests: FileTest) -> FileTest:
    return lambda header: all(test(header) for test in tests)


def none(*fragments: str) -> FileTest:
    found = has(*fragments)
    return lambda header: not found(header)


def beside_unet(*starts: str, labelled: bool) -> FileTest:
    """Whether there is a UNet in the original layout and all of these parts; `labelled`: with an embedding of labels."""

    def test(header: Header) -> bool:
        unet, start = find_unet(header), wrapper(header)
        if unet is None or ("label_emb.0.0.weight" in unet) != labelled:
            return False
        return all(any(name.startswith(start + part) for name in header) for part in starts)

    return test


def _channels(header: Header) -> int:
    """Of the input of a UNet in the original layout; 0 without one."""
    unet = find_unet(header)
    return (unet.shape("input_blocks.0.0.weight") or (0, 0))[1] if unet else 0


_CLIP = has("embeddings.token_embedding.weight", "transformer.resblocks.0.attn.in_proj_weight")


def _deep_clip(header: Header) -> bool:
    """CLIP-L has 12 layers; its image tower, where a file has both, is deeper."""
    text = {name: info for name, info in header.items() if "vision" not in name and "visual" not in name}
    return _CLIP(header) and has("encoder.layers.12.", "transformer.resblocks.12.")(text)


def _language(header: Header) -> bool:
    """Nothing but a language model, as ComfyUI's text encoders are, with or without its vision tower."""
    inside = has("layers.0.mlp.gate_proj.")(header)
    return inside and not any(name.startswith("model.diffusion_model.") for name in header)


def _control(header: Header) -> bool:
    qwens = every(has("transformer_blocks.0.img_mod.1."), has("controlnet_blocks."))
    return has("controlnet_cond_embedding.", "control_model.input_blocks.")(header) or qwens(header)


Rows = tuple[tuple[Kind, FileTest], ...]
_FIRST: Rows = (
    (kinds.LORA, ends(".lora_down.weight", ".lora_up.weight", ".lora_A.weight", ".lora_B.weight", ".lora_A.default.weight",
                      ".lora.down.weight", ".hada_w1_a", ".lokr_w1", ".lokr_w1_a", ".oft_blocks", ".lora_mid.weight")),
    (kinds.CONTROLNET, _control),
    (kinds.EMBEDDING, lambda header: set(header) <= {"emb_params", "clip_g", "clip_l", "t5xxl"} and bool(header)),
    *((kind, lambda header, wide=channels: _channels(header) == wide) for channels, kind in kinds.BY_CHANNELS.items()),
)  # fmt: skip
"""Before all families."""
_WHOLE: Rows = (
    (kinds.SDXL_REFINER, beside_unet("conditioner.embedders.0.model.", labelled=True)),
    (kinds.UNCLIP, beside_unet("cond_stage_model.", labelled=True)),
    (kinds.UNCLIP, beside_unet("noise_augmentor.", labelled=True)),
    (kinds.UNET, lambda header: find_unet(header) is not None),
    (kinds.LUMINA2, every(has("noise_refiner.0."), has("cap_embedder.0.", ".caption_embedder.0."), none("ref_image_"))),
    (kinds.VISION_LANGUAGE, every(_language, has("visual.", "vision_tower."))),
    (kinds.LANGUAGE_MODEL, _language),
    (kinds.DIT, has("transformer_blocks.0.attn", "blocks.0.self_attn.", "blocks.0.cross_attn.", "noise_refiner.0.",
              "double_layers.0.", "caption_projection.", "x_embedder.", "patch_embed.")),
    (kinds.UNET, has("down_blocks.0.resnets.0.time_emb_proj.")),
)  # fmt: skip
_PARTS: Rows = (
    (kinds.VAE, every(has("decoder.conv_in.weight"), has("encoder.conv_in.weight"))),
    (kinds.T5, has("encoder.block.0.layer.0.SelfAttention.")),
    (kinds.CLIP_G, _deep_clip),
    (kinds.CLIP, _CLIP),
    (kinds.LANGUAGE_MODEL, has("layers.0.self_attn.q_proj.", "layers.0.self_attn.qkv_proj.", "h.0.attn.c_attn.")),
)


@cache
def family_kinds() -> tuple[Kind, ...]:
    """All that families bring, in the order in which they are asked for."""
    found = [kind for one in signatures().values() for kind in (*one.bases, *one.others)]
    names = {kind.name: kind for kind in found}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(names, ()))
    for kind in found:
        for later in kind.before:
            sorter.add(later, kind.name)
    return tuple(names[name] for name in sorter.static_order() if name in names)


def classify(header: Header) -> Kind:
    """The kind of a single file."""
    wholes, parts = ([(k, k.file) for k in family_kinds() if k.part is part] for part in (False, True))
    rows = (*_FIRST, *wholes, *_WHOLE, *parts, *_PARTS)
    return next((kind for kind, test in rows if test(header)), kinds.UNKNOWN)


# -- folders

VAES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny")
VISION_LANGUAGE_TYPES = ("qwen2_5_vl", "qwen3_vl", "mistral3")


@dataclass(frozen=True)
class Folder:
    """What the config.json files of a diffusers or transformers folder say."""

    root: Mapping[str, Any]
    index: Mapping[str, Any]
    """model_index.json."""
    unet: Mapping[str, Any]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        return str(self.index.get("_class_name", ""))

    @property
    def whole(self) -> bool:
        """Whether it holds a network that draws."""
        return bool(self.unet or self.transformer)


def named(*words: str) -> FolderTest:
    """Whether a folder with a transformer has one of them in the names of its classes."""

    def test(folder: Folder) -> bool:
        classes = f"{folder.pipeline} {folder.transformer.get('_class_name', '')}" if folder.transformer else ""
        return not folder.unet and any(word in classes for word in words)

    return test


def vae_of(class_name: str) -> FolderTest:
    """Whether a folder is such a VAE alone."""

    def test(folder: Folder) -> bool:
        found = folder.root.get("_class_name") or folder.vae.get("_class_name")
        return found == class_name and not folder.whole and not folder.pipeline

    return test


def transformer(name: str, pt: str, en: str, file: FileTest, words: tuple[str, ...] = (), **more: Any) -> Kind:
    """A diffusion transformer; `words`: one of them is part of the names of its classes in diffusers."""
    return Kind(name, pt, en, file=file, folder=named(*words), in_gguf=True, **more)


def classify_folder(config: Callable[[str], Mapping[str, Any] | None]) -> Kind:
    """The kind of a diffusers or transformers folder, from its config.json files (`config("")` is the root's)."""
    root = config("") or {}
    alone = root if str(root.get("_class_name", "")).endswith("Transformer2DModel") else {}
    folder = Folder(
        root, config("model_index") or {}, config("unet") or {}, config("transformer") or alone, config("vae") or {}
    )
    if folder.unet and (channels := int(folder.unet.get("in_channels", 4))) != 4:
        return kinds.BY_CHANNELS.get(channels, kinds.UNKNOWN)
    if found := next((kind for kind in family_kinds() if kind.folder(folder)), None):
        return found
    if folder.unet:
        return _other_unet(folder.unet)
    if folder.transformer:
        return kinds.LUMINA2 if named("Lumina2")(folder) else kinds.DIT
    return _without_network(folder)


def _other_unet(unet: Mapping[str, Any]) -> Kind:
    if unet.get("addition_embed_type") == "text_time":
        return kinds.SDXL_REFINER
    return kinds.UNCLIP if unet.get("addition_embed_type") or unet.get("class_embed_type") else kinds.UNKNOWN


def _without_network(folder: Folder) -> Kind:
    root = folder.root
    if root.get("_class_name") in VAES or (folder.vae and not folder.pipeline):
        return kinds.VAE
    if root.get("_class_name") == "UNet2DConditionModel":
        return kinds.UNET
    if root.get("peft_type"):
        return kinds.LORA
    if root.get("vision_config") and root.get("model_type") in VISION_LANGUAGE_TYPES:
        return kinds.VISION_LANGUAGE
    architecture = str((root.get("architectures") or [""])[0])
    model_type = str(root.get("model_type") or "")
    if model_type.startswith("clip"):
        text = root.get("text_config") or root
        return kinds.CLIP_G if int(text.get("num_hidden_layers", 12)) > 12 else kinds.CLIP
    if "t5" in model_type:
        return kinds.T5
    if not architecture and model_type and "vocab_size" in root:  # the family knows whether transformers has the type
        return kinds.LANGUAGE_MODEL
    return kinds.LANGUAGE_MODEL if architecture.endswith("ForCausalLM") else kinds.UNKNOWN
