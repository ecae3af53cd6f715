"""The networks of a transformer family's base, wherever its user keeps them.

A diffusers folder or an all-in-one file brings everything; most people have the transformer in one file (safetensors or
GGUF), and text encoders and VAE in files of their own, as ComfyUI keeps them. Each such file is told by its header: one in
the wrong slot is refused by what it is, and what is missing is asked for in one message.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import SourceError, t
from ..files import kinds
from ..files.gguf_names import tensor_name
from ..files.kinds import Kind, Part
from ..files.sources import Source, open_source
from . import architecture, int8, single_file
from . import stored as _stored
from .component import Component
from .components import BUILDERS, Networks, describe_vae
from .gguf import GgufWeights
from .weights import Locate, Piece, Spelled, Weights

Config = dict[str, Any]
NOT_OURS = ("quantization_config", "_name_or_path", "_diffusers_version")


@dataclass(frozen=True)
class Slot:
    """A network besides the transformer: what it is, what people call its file, and where it lies in all-in-one files."""

    part: str
    """As diffusers names it; also the option of `modelo` that gives its file."""
    kind: Kind
    title: str
    """For people: "CLIP-L (clip_l.safetensors)"."""
    prefixes: tuple[str, ...]
    build: Callable[[Mapping[str, Any]], nn.Module]
    describe: Callable[[Part, Config], tuple[Config, Locate]]
    """Config (from the shipped one) and places of a file's tensors."""
    locate: Locate
    """In diffusers folders."""
    float32: tuple[str, ...] = ()
    also: tuple[Kind, ...] = ()
    """Other kinds of file that hold it."""
    optional: bool = False
    """The base works without it."""

    @property
    def option(self) -> str:
        return shown("model", self.part)


@dataclass(frozen=True)
class Transformer:
    """The network that is trained: how to build it and read it from a single file's header."""

    build: Callable[[Mapping[str, Any]], nn.Module]
    derive: Callable[[Mapping[str, Any], Config], tuple[Config, Locate]]


# -- the usual slots


def _describe_clip(part: Part, standard: Config) -> tuple[Config, Locate]:
    return architecture.derive_clip(part, standard), single_file.locate_clip(part)


def build_t5(config: Mapping[str, Any]) -> nn.Module:
    """Without the second name of its embeddings, which would be a second copy, and without dropout, which a run that encodes
    captions while it trains would switch on."""
    from transformers import T5Config, T5EncoderModel

    known = {k: v for k, v in config.items() if k not in ("architectures", "dtype", "torch_dtype", *NOT_OURS)}
    encoder: nn.Module = T5EncoderModel(T5Config(**known | {"dropout_rate": 0.0}))
    encoder.shared = nn.Identity()
    return encoder


def t5_keys(name: str) -> list[str]:
    """Spellings of a parameter of T5's encoder, llama.cpp's last."""
    shared = ["shared.weight"] if name == "encoder.embed_tokens.weight" else []
    return [*shared, name, *filter(None, [tensor_name([*shared, name][0], "t5encoder")])]


def _locate_t5(part: Part | None) -> Locate:
    prefix = part.prefix if part else ""
    return lambda name: [Piece(prefix + key) for key in t5_keys(name)]


def _describe_t5(part: Part, standard: Config) -> tuple[Config, Locate]:
    """All sizes can be read off the tensors."""

    file, block = Spelled(part.header, _locate_t5(part)), "encoder.block.0.layer"
    vocabulary, width = file.sides("encoder.embed_tokens")
    buckets, heads = file.sides(f"{block}.0.SelfAttention.relative_attention_bias")
    config = standard | {
        "vocab_size": vocabulary, "d_model": width, "num_heads": heads, "relative_attention_num_buckets": buckets,
        "num_layers": file.count("encoder.block.{}.layer.0.layer_norm.weight"),
        "d_kv": file.sides(f"{block}.0.SelfAttention.q")[0] // heads, "d_ff": file.sides(f"{block}.1.DenseReluDense.wi_0")[0],
    }  # fmt: skip
    return config, file.locate


CLIP_L = Slot(
    "text_encoder", kinds.CLIP, "CLIP-L (clip_l.safetensors)", ("text_encoders.clip_l.",),
    BUILDERS["text_encoder"], _describe_clip, single_file.locate_clip(),
)  # fmt: skip
T5_XXL = Slot(
    "text_encoder_2", kinds.T5, "T5-XXL (t5xxl_fp16.safetensors, t5xxl_fp8_e4m3fn.safetensors)",
    ("text_encoders.t5xxl.transformer.",), build_t5, _describe_t5, _locate_t5(None), float32=("wo",),
)  # fmt: skip
VAE = Slot(
    "vae", kinds.VAE, "VAE (ae.safetensors)", ("vae.", "first_stage_model."),
    BUILDERS["vae"], describe_vae, single_file.locate_diffusers_vae,
)  # fmt: skip


# -- opening


def open_parts(
    source: Source, settings: ModelConfig, release: str, transformer: Transformer, slots: Sequence[Slot]
) -> Networks:
    """All components of a base, checked against its files. `release`: the folder of arch/."""
    opened = _Opener(source, settings, release, tuple(slots))
    components = {"transformer": opened.transformer(transformer)}
    missing = []
    for slot in slots:
        component = opened.slot(slot)
        if component is not None:
            components[slot.part] = component
        elif not slot.optional:
            missing.append(slot)
    if missing:
        raise _missing(source, missing)
    few_layers = {slot.part for slot in slots if slot.kind in (kinds.LANGUAGE_MODEL, kinds.VISION_LANGUAGE)}
    for part, component in components.items():
        used = component.used_keys()
        if part not in few_layers and component.has_weights:
            _refuse_unread_layers(component, used)
    scheduler = architecture.given(settings.architecture, "scheduler") or source.config("scheduler")
    notices = [_kept_notice(components["transformer"])] if components["transformer"].has_weights else []
    return Networks(components, scheduler or architecture.shipped(release, "scheduler"), [n for n in notices if n])


@dataclass(frozen=True)
class _Opener:
    source: Source
    settings: ModelConfig
    release: str
    slots: tuple[Slot, ...]

    def transformer(self, spec: Transformer) -> Component:
        source = self.source
        sub = "transformer" if source.config("transformer") else ""
        if source.kind == "folder":
            config, locate = source.config(sub) or {}, cast(Locate, single_file.locate_same)
        else:
            standard = architecture.shipped(self.release, "transformer")
            derived, locate = spec.derive(source.tensors, standard)
            config = architecture.given(self.settings.architecture, "transformer") or derived
        weights = _stored.open_weights(source, sub)
        return Component("transformer", _ours(config), spec.build, weights, locate, source.what, as_stored=True)

    def slot(self, slot: Slot) -> Component | None:
        """From its own option, else from the base; None where neither has it."""
        if text := getattr(self.settings, slot.part):
            return self._given(slot, open_source(text, slot.option))
        if self.source.kind == "folder" and self.source.config(slot.part):
            return self._of_folder(slot, self.source, slot.part)
        if self.source.kind == "file":
            for prefix in slot.prefixes:
                if any(key.startswith(prefix) for key in self.source.tensors):
                    return self._of_file(slot, self.source, prefix)
        if self.source.planning:
            config = architecture.given(self.settings.architecture, slot.part)
            return self._component(
                slot, config or architecture.shipped(self.release, slot.part), Weights({}), slot.locate, self.source.what
            )
        return None

    def _given(self, slot: Slot, source: Source) -> Component:
        kind = source.looks_like()
        if source.kind == "folder" and source.config(slot.part):
            return self._of_folder(slot, source, slot.part)
        if kind not in (slot.kind, *slot.also):
            raise _wrong_slot(slot, source, kind, self.slots)
        if source.kind == "folder":
            return self._of_folder(slot, source, "")
        return self._of_file(slot, source, "")

    def _of_folder(self, slot: Slot, source: Source, sub: str) -> Component:
        weights = _stored.open_weights(source, sub)
        return self._component(slot, source.config(sub) or {}, weights, slot.locate, source.what)

    def _of_file(self, slot: Slot, source: Source, prefix: str) -> Component:
        derived, locate = slot.describe(Part(source.tensors, prefix), architecture.shipped(self.release, slot.part))
        config = architecture.given(self.settings.architecture, slot.part) or derived
        return self._component(slot, config, _stored.open_weights(source), locate, source.what)

    def _component(self, slot: Slot, config: Config, weights: Weights, locate: Locate, what: str) -> Component:
        stored = slot.part != "vae"
        return Component(slot.part, _ours(config), slot.build, weights, locate, what, stored, slot.float32)


_COUNTS = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "num_refiner_layers",
           "num_hidden_layers", "approximator_layers")
"""In the configs of transformers and encoders. Of a language model, only the layers whose states are wanted are read."""


def _refuse_unread_layers(component: Component, used: Collection[str]) -> None:
    """Layers are counted up to the first gap: a tensor lost there must not make a smaller network that passes for whole."""
    numbered = {_NUMBER.sub(".N", key) for key in used}
    unread = sorted(key for key in component.weights.header if key not in used and _NUMBER.sub(".N", key) in numbered)
    none = [name for name in _COUNTS if component.config.get(name) == 0]
    if unread or none:
        listed = ", ".join(unread[:3] or none) + (", …" if len(unread) > 3 else "")
        raise SourceError.said(
            pt=f"{component.name}: há camadas que só em parte estão no arquivo ({listed})",
            en=f"{component.name}: some layers are in the file only in part ({listed})",
            hint_pt="o arquivo está incompleto ou estragado, ou o config.json é de outro: baixe-os de novo",
            hint_en="the file is incomplete or damaged, or the config.json is another's: download them again",
            where=component.what,
        )


_NUMBER = re.compile(r"\.\d+(?=\.)")


def _ours(config: Mapping[str, Any]) -> Config:
    """Without what a quantiser wrote into it."""
    return {name: value for name, value in config.items() if name not in NOT_OURS}


def _kept_notice(transformer: Component) -> str:
    weights = transformer.weights
    if isinstance(weights, GgufWeights) and weights.unpacked_kinds():
        return weights.unpacked_notice()
    formats = _stored.stored_formats(transformer.weights, transformer.used_keys())
    if any(transformer.weights.header[key].dtype == "I8" for key in transformer.used_keys()):
        return int8.notice()
    if not formats:
        return ""
    listed = ", ".join(sorted(formats))
    but = ""
    if formats == {"fp8"}:
        but = t(pt=", a menos que memoria.quantizacao_base peça nf4", en=", unless memory.base_quantization asks for nf4")
    return t(
        pt=f"o modelo base fica como está no arquivo ({listed}){but}", en=f"the base stays as its file has it ({listed}){but}"
    )


def _wrong_slot(slot: Slot, source: Source, kind: Kind, slots: Sequence[Slot]) -> SourceError:
    right = next((other.option for other in slots if kind in (other.kind, *other.also)), None)
    looks = kind.title() if kind is not kinds.UNKNOWN else t(pt="nada que eu conheça", en="nothing that is known here")
    way = ""
    if right:
        way = t(pt=f"; este arquivo cabe em {right}", en=f"; this file belongs in {right}")
    return SourceError(
        t(pt=f"{source.title()} parece {looks}, não o {slot.title}", en=f"{source.title()} looks like {looks}, not {slot.title}"),
        t(pt=f"dê aqui o {slot.title}", en=f"give {slot.title} here") + way,
        slot.option,
    )


def _missing(source: Source, slots: Sequence[Slot]) -> SourceError:
    listed = "".join(f"\n  - {slot.option}: {slot.title}" for slot in slots)
    return SourceError.said(
        pt=f"{source.title()} só traz parte do modelo; faltam:{listed}",
        en=f"{source.title()} brings only a part of the model; missing:{listed}",
        hint_pt="indique os arquivos que você usa no ComfyUI, ou a pasta completa do diffusers em modelo.modelo_base",
        hint_en="name the files you use in ComfyUI, or give the whole diffusers folder in model.base_model",
        where=source.what,
    )
