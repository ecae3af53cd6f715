"""Which FLUX.2 a transformer is, and what goes with it: its language model, the words around a caption, and its notices.

klein's base and distilled models have the same tensors, so only a diffusers folder (model_index.json) tells them apart.
"""

from dataclasses import dataclass
from typing import Any

from ...bases import architecture as _architecture
from ...bases.llm_tokenizers import QWEN3_PLACES, find_llm_tokenizer
from ...config.names import shown
from ...config.schema import ModelConfig
from ...errors import SourceError, t
from ...files.sources import Source
from . import names as _flux2_names

_QWEN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Qwen3's chat template without thinking."""
_MISTRAL = (
    "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
)
MISTRAL_PLACES = (
    ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", ""),
    ("black-forest-labs/FLUX.2-dev", "tokenizer/"),
)


@dataclass(frozen=True)
class Release:
    arch: str
    """Folder of arch/."""
    variant: str
    """Of metadata: klein-4b, klein-9b, dev."""
    model: str
    """Of llm_text.MODELS."""
    encoder: str
    """Its text encoder, for people."""
    prefix: str
    """Where that lies in all-in-one files."""
    layers: tuple[int, ...] = (9, 18, 27)
    template: str = _QWEN
    marks: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    """Single tokens of its vocabulary."""
    pad: str = "<|endoftext|>"
    pads_left: bool = False
    places: tuple[tuple[str, str], ...] = QWEN3_PLACES
    vocabulary: str = "Qwen3"


KLEIN_4B = Release("flux2", "klein-4b", "qwen3", "Qwen3-4B (qwen_3_4b.safetensors)", "text_encoders.qwen3_4b.transformer.")
KLEIN_9B = Release(
    "flux2_klein_9b", "klein-9b", "qwen3", "Qwen3-8B (qwen_3_8b.safetensors)", "text_encoders.qwen3_8b.transformer."
)
DEV = Release(
    "flux2_dev", "dev", "mistral", "Mistral Small 3.2 (mistral_3_small_flux2_bf16.safetensors)",
    "text_encoders.mistral3_24b.transformer.", (10, 20, 30), _MISTRAL, ("<s>", "[SYSTEM_PROMPT]", "[/INST]"),
    "<pad>", True, MISTRAL_PLACES, "Mistral Small",
)  # fmt: skip


def find_release(source: Source, settings: ModelConfig) -> Release:
    """Told by the transformer: guidance is dev's, the width of its text klein's."""
    config = _architecture.given(settings.architecture, "transformer")
    if config is None and source.kind == "folder":
        config = source.config("transformer") or source.config("")
    config = config or _flux2_names.derive(source.tensors, _architecture.shipped(KLEIN_4B.arch, "transformer"))[0]
    if config.get("guidance_embeds", True):
        return DEV
    wide = _architecture.shipped(KLEIN_9B.arch, "transformer")["joint_attention_dim"]
    return KLEIN_9B if config.get("joint_attention_dim") == wide else KLEIN_4B


def find_tokenizer(source: Source, settings: ModelConfig, release: Release) -> Any:
    """Of the release's language model; SourceError where it does not know the words around captions."""
    tokenizer = find_llm_tokenizer(source, settings.tokenizer, "tokenizer", release.places, release.vocabulary)
    known = {} if source.planning else tokenizer.get_vocab()
    missing = [mark for mark in (*release.marks, release.pad) if not source.planning and mark not in known]
    if missing:
        raise SourceError.said(
            pt=f"o tokenizador não é o do {release.vocabulary}: falta {', '.join(missing)}",
            en=f"the tokenizer is not {release.vocabulary}'s: {', '.join(missing)} is missing",
            hint_pt=f"indique em modelo.tokenizador a pasta do tokenizador de {release.places[0][0]}",
            hint_en=f"name the tokenizer folder of {release.places[0][0]} in model.tokenizer",
            where=shown("model", "tokenizer"),
        )
    return tokenizer


def told_distilled(source: Source) -> bool | None:
    """Whether klein is the one distilled to few steps; None where the base does not tell."""
    index = source.config("model_index")
    return bool(index.get("is_distilled", "KV" in str(index.get("_class_name")))) if index else None


def distilled_notice() -> str:
    return t(
        pt="o modelo base é um FLUX.2 klein destilado para 4 passos: treinar nele desfaz aos poucos a destilação; treine no "
        "klein base (o LoRA também funciona no destilado), ou prefira poucos passos e taxa baixa",
        en="the base is a FLUX.2 klein distilled to 4 steps: training on it undoes the distillation bit by bit; train on "
        "klein base (the LoRA works on the distilled one too), or prefer few steps and a low rate",
    )


def unsure_notice(source: Source) -> str:
    """ "" where there is nothing to be said."""
    if source.planning or "base" in source.title().lower():
        return ""
    guidance, steps = shown("samples", "guidance"), shown("samples", "steps")
    return t(
        pt="o arquivo não diz se é o FLUX.2 klein base ou o destilado para 4 passos: treine no base (flux-2-klein-base-…); se "
        f"este é o destilado, use {guidance}: 1 e {steps}: 4, com poucos passos de treino e taxa baixa",
        en="the file does not tell whether it is FLUX.2 klein base or the one distilled to 4 steps: train on base "
        f"(flux-2-klein-base-…); if this is the distilled one, set {guidance}: 1 and {steps}: 4, with few training steps "
        "and a low rate",
    )
