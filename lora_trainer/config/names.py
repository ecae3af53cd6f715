"""Every spelling of every option, derived from the schema, and the nearest one to what somebody typed.

Nothing is listed twice: sections, options, kinds and choices are read off the declarations. The one hand-written table
is FOREIGN, names that other trainers use, which serve for hints only and are never accepted.
"""

import difflib
import types
import typing
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ..errors import language, t
from .fields import NO, YES
from .schema import MOVED, WORDS, Config

Key = tuple[str, str]
"""(section, option), in the English spelling."""

KINDS = ("boolean", "number", "integer", "resolution", "text", "local_path", "path_or_hub", "share", "tokens")
PATH_KINDS = ("local_path", "path_or_hub")
NUMBER_KINDS = ("number", "integer", "resolution", "share", "tokens")

FOREIGN: dict[str, Key] = {
    "pretrained_model_name_or_path": ("model", "base_model"),
    "model_name_or_path": ("model", "base_model"),
    "base_model_name": ("model", "base_model"),
    "name_or_path": ("model", "base_model"),
    "checkpoint": ("model", "base_model"),
    "algo": ("model", "adapter_kind"),
    "network_type": ("model", "adapter_kind"),
    "decompose_factor": ("model", "lokr_factor"),
    "init_lora_weights": ("model", "lora_init"),
    "rank_pattern": ("model", "lora_rules"),
    "network_dim": ("model", "lora_rank"),
    "rank": ("model", "lora_rank"),
    "lora_r": ("model", "lora_rank"),
    "r": ("model", "lora_rank"),
    "linear": ("model", "lora_rank"),
    "network_alpha": ("model", "lora_alpha"),
    "alpha": ("model", "lora_alpha"),
    "linear_alpha": ("model", "lora_alpha"),
    "network_dropout": ("model", "lora_dropout"),
    "conv_dim": ("model", "conv_rank"),
    "target_modules": ("model", "lora_targets"),
    "lora_target": ("model", "lora_targets"),
    "use_rslora": ("model", "rslora"),
    "use_dora": ("model", "dora"),
    "network_weights": ("model", "initial_lora"),
    "v_parameterization": ("model", "prediction_type"),
    "train_data_dir": ("data", "data_dir"),
    "instance_data_dir": ("data", "data_dir"),
    "image_dir": ("data", "data_dir"),
    "folder_path": ("data", "data_dir"),
    "dataset": ("data", "data_dir"),
    "cutoff_len": ("data", "max_length"),
    "max_seq_length": ("data", "max_length"),
    "sequence_len": ("data", "max_length"),
    "sample_packing": ("data", "packing"),
    "neat_packing": ("data", "packing"),
    "train_on_inputs": ("data", "loss_on"),
    "max_resolution": ("data", "resolution"),
    "num_repeats": ("data", "repeats"),
    "instance_prompt": ("data", "trigger"),
    "trigger_word": ("data", "trigger"),
    "enable_bucket": ("data", "buckets"),
    "bucket_reso_steps": ("data", "bucket_step"),
    "flip_aug": ("data", "flip"),
    "random_flip": ("data", "flip"),
    "shuffle_caption": ("data", "shuffle_captions"),
    "keep_tokens": ("data", "keep_tags"),
    "keep_tokens_separator": ("data", "keep_separator"),
    "caption_tag_dropout_rate": ("data", "tag_dropout"),
    "caption_dropout_rate": ("data", "caption_dropout"),
    "max_token_length": ("data", "max_caption_tokens"),
    "cache_text_encoder_outputs": ("data", "cache_text_encoder"),
    "reg_data_dir": ("data", "regularization_dir"),
    "class_data_dir": ("data", "regularization_dir"),
    "prior_loss_weight": ("data", "prior_weight"),
    "max_train_epochs": ("training", "epochs"),
    "num_train_epochs": ("training", "epochs"),
    "num_epochs": ("training", "epochs"),
    "max_train_steps": ("training", "max_steps"),
    "steps": ("training", "max_steps"),
    "train_batch_size": ("training", "batch_size"),
    "per_device_train_batch_size": ("training", "batch_size"),
    "micro_batch_size": ("training", "batch_size"),
    "gradient_accumulation": ("training", "gradient_accumulation_steps"),
    "lr": ("training", "learning_rate"),
    "unet_lr": ("training", "learning_rate"),
    "text_encoder_lr": ("training", "text_encoder_learning_rate"),
    "loraplus_lr_ratio": ("training", "lora_plus_ratio"),
    "optimizer_type": ("training", "optimizer"),
    "use_8bit_adam": ("training", "use_8bit_optimizer"),
    "scheduler": ("training", "lr_scheduler"),
    "lr_scheduler_type": ("training", "lr_scheduler"),
    "lr_warmup_steps": ("training", "lr_warmup"),
    "warmup_steps": ("training", "lr_warmup"),
    "warmup_ratio": ("training", "lr_warmup"),
    "loss_type": ("training", "loss"),
    "blocks_to_swap": ("memory", "block_streaming"),
    "block_swap": ("memory", "block_streaming"),
    "layer_offload_fraction": ("memory", "block_streaming"),
    "fp8_base": ("memory", "base_quantization"),
    "load_in_4bit": ("memory", "base_quantization"),
    "load_in_8bit": ("memory", "base_quantization"),
    "quantize": ("memory", "base_quantization"),
    "base_model_precision": ("memory", "base_quantization"),
    "low_vram": ("memory", "preset"),
    "lowram": ("memory", "preset"),
    "fused_backward_pass": ("memory", "optimizer_in_backward"),
    "cpu_offload_checkpointing": ("memory", "activation_offload"),
    "vae_batch_size": ("memory", "vae_tiling"),
    "enable_vae_tiling": ("memory", "vae_tiling"),
    "save_every_n_steps": ("output", "save_every"),
    "output_dir": ("output", "dir"),
    "output_name": ("output", "name"),
    "save_precision": ("output", "precision"),
    "sample_prompts": ("samples", "prompts"),
    "sample_every_n_steps": ("samples", "every"),
}


@dataclass(frozen=True)
class Option:
    section: str
    name: str
    section_pt: str
    pt: str
    doc_pt: str
    doc_en: str
    kind: str
    """One of KINDS, "choice", or "any" (free-form mapping)."""
    choices: tuple[Any, ...]
    many: bool
    nullable: bool
    default: Any
    limits: dict[str, Any]
    """ge, gt, le, lt, multiple_of, where declared."""

    @property
    def key(self) -> Key:
        return (self.section, self.name)

    def shown(self, lang: str = "") -> str:
        """`treino.epocas` or `training.epochs`."""
        lang = lang or language()
        return f"{self.section_pt}.{self.pt}" if lang == "pt" else f"{self.section}.{self.name}"

    def language_of(self, written: str) -> str:
        """The language of the spelling typed; where both are spelled alike, that of the messages."""
        last = written.rsplit(".", 1)[-1]
        if (last == self.pt) == (last == self.name):
            return language()
        return "pt" if last == self.pt else "en"

    def allowed_words(self, lang: str) -> list[str]:
        if self.kind == "boolean":
            return ["sim", "não"] if lang == "pt" else ["yes", "no"]
        if self.kind == "share":
            return ["auto", self.word("no", lang)]
        return [self.word(choice, lang) for choice in self.choices]

    def word(self, choice: Any, lang: str) -> str:
        """The spelling of a choice in a language."""
        spellings = [w for w, meaning in WORDS.get(self.name, {}).items() if meaning == choice] if lang == "pt" else []
        return spellings[0] if spellings else str(choice)


def fold(text: str) -> str:
    """Lower case, no accents, `-` as `_`: for comparing, not for storing."""
    plain = unicodedata.normalize("NFKD", text.strip().lower())
    return "".join(c for c in plain if not unicodedata.combining(c)).replace("-", "_")


def _unwrap(annotation: Any) -> tuple[Any, bool, bool, str]:
    """(innermost type, is a list, may be None, kind marker) of an annotation."""
    many, nullable, marker = False, False, ""
    while True:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is typing.Annotated:
            marker = marker or next((m for m in args[1:] if isinstance(m, str)), "")
            annotation = args[0]
        elif origin in (Union, types.UnionType):
            nullable = type(None) in args
            annotation = next(a for a in args if a is not type(None))
        elif origin is list:
            many, annotation = True, args[0]
        else:
            return annotation, many, nullable, marker


def _option(section: str, section_pt: str, name: str, field: FieldInfo, annotation: Any) -> Option:
    inner, many, nullable, marker = _unwrap(annotation)
    choices = get_args(inner) if get_origin(inner) is Literal else ()
    extra = typing.cast(dict[str, Any], field.json_schema_extra)
    limits = {
        limit: getattr(constraint, limit)
        for constraint in field.metadata
        for limit in ("ge", "gt", "le", "lt", "multiple_of")
        if hasattr(constraint, limit)
    }
    return Option(
        section=section,
        name=name,
        section_pt=section_pt,
        pt=extra["pt"],
        doc_pt=extra["doc_pt"],
        doc_en=extra["doc_en"],
        kind=marker or ("choice" if choices else "any"),
        choices=choices,
        many=many,
        nullable=nullable,
        default=field.get_default(call_default_factory=True),
        limits=limits,
    )


@cache
def sections() -> dict[str, str]:
    """English section name -> Portuguese one."""
    return {
        name: typing.cast(dict[str, str], field.json_schema_extra)["pt"] for name, field in Config.model_fields.items()
    }


@cache
def options() -> dict[Key, Option]:
    found: dict[Key, Option] = {}
    for section, section_pt in sections().items():
        model = typing.cast(Any, Config.model_fields[section].annotation)
        hints = typing.get_type_hints(model, include_extras=True)
        for name, field in model.model_fields.items():
            found[section, name] = _option(section, section_pt, name, field, hints[name])
    return found


def shown(section: str, name: str) -> str:
    """An option's full name in the language in force: `modelo.vae` or `model.vae`. For `where=` and hints."""
    return options()[section, name].shown()


def by_shown(text: str) -> Option | None:
    """The option of a full name, in either language."""
    section, _, name = text.partition(".")
    home = find_section(section)
    return find_option(home, name) if home else None


@cache
def spellings(section: str) -> dict[str, Option]:
    """Every key accepted in a section, in both languages, with the options that are accepted there as guests."""
    own = [option for option in options().values() if option.section == section]
    guests = [options()[home, name] for (guest_of, name), home in MOVED.items() if guest_of == section]
    return {spelling: option for option in own + guests for spelling in (option.name, option.pt)}


def find_section(text: str) -> str | None:
    return next((en for en, pt in sections().items() if text in (en, pt)), None)


def find_option(section: str, text: str) -> Option | None:
    return spellings(section).get(text)


def to_word(option: Option, value: Any) -> Any:
    """The word used in code for one of its spellings; anything else comes back as it was."""
    if option.many and isinstance(value, list):
        return [_to_word(option, item) for item in value]
    return _to_word(option, value)


def _to_word(option: Option, value: Any) -> Any:
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if not isinstance(value, str) or not (option.choices or option.name in WORDS):
        return value
    table = {fold(word): meaning for word, meaning in WORDS.get(option.name, {}).items()}
    table |= {fold(meaning): meaning for meaning in table.values()}
    table |= {fold(str(choice)): choice for choice in option.choices}
    if option.choices and value.strip().lower() in YES | NO:
        table.setdefault(fold(value), "yes" if value.strip().lower() in YES else "no")
    word = table.get(fold(value), value)
    return word if word in option.choices or not option.choices else value


def nearest(text: str, candidates: typing.Iterable[str], cutoff: float = 0.65) -> str | None:
    """The candidate most like the text, accents and case apart."""
    folded = {fold(c): c for c in candidates}
    match = difflib.get_close_matches(fold(text), folded, 1, cutoff)
    return folded[match[0]] if match else None


def suggest(text: str, section: str | None = None, *, moved: bool = True) -> str:
    """A hint for a key that is not accepted where it was written. `moved`: it may belong to another section."""
    last = text.rsplit(".", 1)[-1]
    here = nearest(last, spellings(section)) if section else None
    if here and fold(here) == fold(last):
        return _did_you_mean(here)
    if fold(last) in FOREIGN:
        known = options()[FOREIGN[fold(last)]].shown()
        return t(pt=f"aqui esta opção se chama `{known}`", en=f"here this option is called `{known}`")
    far = _elsewhere(last, section, 0.9) if moved else None
    if moved and not (far or here) and len(last) > 4:  # among short words everything is alike
        far = _elsewhere(last, section, 0.75)
    if far:
        return t(pt=f"esta opção fica em outra seção: `{far}`", en=f"this option lives in another section: `{far}`")
    if here:
        return _did_you_mean(here)
    if section is None:
        if near := nearest(text.split(".", 1)[0], [*sections(), *sections().values()], 0.7):
            return _did_you_mean(near)
        names = ", ".join(sections().values() if language() == "pt" else sections())
        return t(pt=f"seções: {names}", en=f"sections: {names}")
    own = [o for o in options().values() if o.section == section]
    names = ", ".join(o.pt if language() == "pt" else o.name for o in own)
    return t(pt=f"chaves aceitas aqui: {names}", en=f"keys accepted here: {names}")


def _did_you_mean(name: str) -> str:
    return t(pt=f"você quis dizer `{name}`?", en=f"did you mean `{name}`?")


def _elsewhere(last: str, section: str | None, cutoff: float) -> str | None:
    """`section.option`, in the spelling's own language, of the option nearest to a bare name."""
    full: dict[str, Option] = {}
    for other in sections():
        for spelling, option in spellings(other).items() if other != section else ():
            full.setdefault(spelling, option)
    near = nearest(last, full, cutoff)
    return full[near].shown(full[near].language_of(near)) if near else None
