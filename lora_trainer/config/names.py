"""Every spelling of every option, derived from the schema, and the nearest one to what somebody typed.

Nothing is listed twice: sections, options, kinds, choices and words are read off the declarations.
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
from .fields import NO, YES, Key, docs_of
from .schema import Config

INPUT_KINDS = ("local_path", "folder", "path_or_hub")
PATH_KINDS = (*INPUT_KINDS, "output_folder")
KINDS = ("boolean", "number", "integer", "resolution", "text", "share", "tokens", *PATH_KINDS)
NUMBER_KINDS = ("number", "integer", "resolution", "share", "tokens")


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
    words: dict[str, str]
    """Portuguese word -> the word used in code. A boolean `false` counts as "no", `true` as "yes"."""
    elsewhere: list[str]
    """What other trainers call it."""
    also_in: str
    """Another section where it is accepted."""
    many: bool
    nullable: bool
    default: Any
    limits: dict[str, Any]
    """ge, gt, le, lt, multiple_of, where declared."""

    @property
    def key(self) -> Key:
        return (self.section, self.name)

    @property
    def doc(self) -> str:
        return t(pt=self.doc_pt, en=self.doc_en)

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
        spellings = (word for word, meaning in self.words.items() if meaning == choice and lang == "pt")
        return next(spellings, str(choice))

    def said(self, value: Any) -> str:
        """A value as people read it: `sim`, `512x768`, `0.5`."""
        if isinstance(value, tuple):
            return "x".join(map(str, value))
        return self.word(value, language()) if isinstance(value, str) else f"{value:g}"


def fold(text: str) -> str:
    """Lower case, no accents, `-` as `_`: for comparing, not for storing."""
    plain = unicodedata.normalize("NFKD", text.strip().lower())
    return "".join(c for c in plain if not unicodedata.combining(c)).replace("-", "_")


def _unwrap(annotation: Any) -> tuple[Any, bool, bool, list[Any]]:
    """(innermost type, is a list, may be None, what is noted beside the types) of an annotation."""
    many, nullable = False, False
    notes: list[Any] = []
    while True:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is typing.Annotated:
            notes += args[1:]
            annotation = args[0]
        elif origin in (Union, types.UnionType):
            nullable = type(None) in args
            annotation = next(a for a in args if a is not type(None))
        elif origin is list:
            many, annotation = True, args[0]
        else:
            return annotation, many, nullable, notes


def _option(section: str, name: str, field: FieldInfo, annotation: Any) -> Option:
    inner, many, nullable, notes = _unwrap(annotation)
    choices = get_args(inner) if get_origin(inner) is Literal else ()
    kind = next((note for note in notes if isinstance(note, str)), "choice" if choices else "any")
    declared = typing.cast(dict[str, Any], field.json_schema_extra)
    of_type = next((note for note in notes if isinstance(note, dict)), {})
    doc_pt, doc_en = docs_of(field)
    return Option(
        section=section,
        name=name,
        section_pt=sections()[section],
        doc_pt=doc_pt,
        doc_en=doc_en,
        kind=kind,
        choices=choices,
        many=many,
        nullable=nullable,
        default=field.get_default(call_default_factory=True),
        **declared | {"words": of_type | declared["words"]},
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
    for section, declared in Config.model_fields.items():
        model = typing.cast(Any, declared.annotation)
        hints = typing.get_type_hints(model, include_extras=True)
        for name, field in model.model_fields.items():
            found[section, name] = _option(section, name, field, hints[name])
    return found


@cache
def foreign() -> dict[str, Option]:
    """Names that other trainers use -> the option they mean."""
    return {name: option for option in options().values() for name in option.elsewhere}


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
    guests = [option for option in options().values() if option.also_in == section]
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
    if not isinstance(value, str) or not (option.choices or option.words):
        return value
    table = {fold(word): meaning for word, meaning in option.words.items()}
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
        return did_you_mean(here)
    if fold(last) in foreign():
        known = foreign()[fold(last)].shown()
        return t(pt=f"aqui esta opção se chama `{known}`", en=f"here this option is called `{known}`")
    far = _elsewhere(last, section, 0.9) if moved else None
    if moved and not (far or here) and len(last) > 4:  # among short words everything is alike
        far = _elsewhere(last, section, 0.75)
    if far:
        return t(pt=f"esta opção fica em outra seção: `{far}`", en=f"this option lives in another section: `{far}`")
    if here:
        return did_you_mean(here)
    if section is None:
        if near := nearest(text.split(".", 1)[0], [*sections(), *sections().values()], 0.7):
            return did_you_mean(near)
        return section_list()
    own = [o for o in options().values() if o.section == section]
    names = ", ".join(o.pt if language() == "pt" else o.name for o in own)
    return t(pt=f"chaves aceitas aqui: {names}", en=f"keys accepted here: {names}")


def section_list() -> str:
    return t(pt=f"seções: {', '.join(sections().values())}", en=f"sections: {', '.join(sections())}")


def did_you_mean(name: str | None) -> str:
    return t(pt=f"você quis dizer `{name}`?", en=f"did you mean `{name}`?") if name else ""


def _elsewhere(last: str, section: str | None, cutoff: float) -> str | None:
    """`section.option`, in the spelling's own language, of the option nearest to a bare name."""
    full: dict[str, Option] = {}
    for other in sections():
        for spelling, option in spellings(other).items() if other != section else ():
            full.setdefault(spelling, option)
    near = nearest(last, full, cutoff)
    return full[near].shown(full[near].language_of(near)) if near else None
