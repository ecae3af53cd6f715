"""How an option is declared: once, with both names, its words, range and default, and one text in each language below it.

Attribute names are the English spelling; `pt` is the Portuguese one. Everything else (accepted keys, JSON Schema, the
effective config, error messages) is derived from the declaration. The text is the attribute's docstring, `pt: … en: …`,
which pydantic keeps as the field's description.
"""

import contextlib
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

YES = {"sim", "yes", "true", "on", "ligado", "verdadeiro"}
MAX_SIDE = 16384
"""Pixels. Far beyond any model; a larger side is a slip of the finger."""
NO = {"nao", "não", "no", "false", "off", "desligado", "falso"}

_DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
_NUMERAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf(inity)?", re.IGNORECASE)
_WHOLE = re.compile(r"[-+]?[\d_]+")


Key = tuple[str, str]
"""(section, option), in the English spelling."""
LIMITS = ("ge", "gt", "le", "lt", "multiple_of")
NO_WORDS = {"nao": "no", "não": "no"}
YES_NO_WORDS = {"sim": "yes", **NO_WORDS}
"""Portuguese word -> the word used in code."""


def option(
    default: Any,
    *,
    pt: str,
    words: Mapping[str, str] | None = None,
    elsewhere: str = "",
    also_in: str = "",
    docs: str | None = None,
    **constraints: Any,
) -> Any:
    """Declare one option. `constraints` go to pydantic's Field (ge, gt, le, lt, …).

    `words`: Portuguese word -> the word used in code. `elsewhere`: what other trainers call it, for hints only; these names
    are never accepted. `also_in`: another section where it is accepted. `docs`: its text, where it is no attribute with a
    docstring.
    """
    extra: dict[str, Any] = {
        "pt": pt,
        "words": dict(words or {}),
        "elsewhere": elsewhere.split(),
        "also_in": also_in,
        "limits": {name: constraints[name] for name in LIMITS if name in constraints},
    }
    return Field(default, description=docs, json_schema_extra=extra, **constraints)


def section(model: type[BaseModel], *, pt: str) -> Any:
    return Field(default_factory=model, json_schema_extra={"pt": pt})


def docs_of(field: FieldInfo) -> tuple[str, str]:
    """What a declaration says of itself, in Portuguese and in English."""
    assert field.description, "an option without a text"
    pt, _, en = field.description.removeprefix("pt: ").partition("\nen: ")
    return " ".join(pt.split()), " ".join(en.split())


Settings = TypeVar("Settings", bound=BaseModel)


class Section(BaseModel):
    """A group of options. Unknown keys are refused; nobody receives more than the section they need."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, use_attribute_docstrings=True)


def value_of(config: BaseModel, key: Key) -> Any:
    """Of an option, by its section and name."""
    return getattr(getattr(config, key[0]), key[1])


def with_values(config: Settings, values: Mapping[Key, Any]) -> Settings:
    """The config with some options replaced."""
    for (section, name), value in values.items():
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def _boolean(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in YES or word in NO:
        return word in YES
    raise PydanticCustomError("boolean", "expected true or false")


def _switch(value: Any) -> Any:
    """A boolean stands for yes or no: `auto` is the third word of what used to be true or false."""
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _share(value: Any) -> Any:
    """auto, no (= 0), yes (= 1), or a number from 0 to 1."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word == "auto":
        return word
    if isinstance(word, bool) or (isinstance(word, str) and word in YES | NO):
        return 1.0 if word is True or word in YES else "no"
    share = _float(_number(value))
    if not 0 <= share <= 1:
        raise PydanticCustomError("share", "expected auto, no or a number from 0 to 1")
    return share or "no"


def _float(value: Any) -> float:
    """Not a number where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _refuse_comma(text: str) -> None:
    if _DECIMAL_COMMA.fullmatch(text):
        raise PydanticCustomError("decimal_comma", "decimal comma", {"fixed": text.replace(",", ".")})


def _tokens(value: Any) -> Any:
    """auto, or a number of tokens; which numbers a family takes it says itself."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    count = _float(_integer(value))
    if not count.is_integer() or count < 1:
        raise PydanticCustomError("tokens", "expected auto or a number of tokens")
    return int(count)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "expected a number")
    if isinstance(value, str):
        value = value.strip()
        _refuse_comma(value)
    return value


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """The value, with every text in it changed, however deep in lists and mappings it lies."""
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def typed(value: Any) -> Any:
    """The values of a free-form mapping: quotes, a shell or a reference make text of `False` and `0.9`, and as text
    `False` would count as true."""
    return map_texts(value, _typed)


def _typed(value: str) -> Any:
    text = value.strip()
    if text.lower() in YES | NO:
        return text.lower() in YES
    _refuse_comma(text)
    for number in (int, float) if _NUMERAL.fullmatch(text) else ():
        with contextlib.suppress(ValueError):
            return number(text)
    return value


def _integer(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, int) or (isinstance(value, str) and _WHOLE.fullmatch(value)):
        return value  # through a float, 2**63 - 1 would become 2**63
    as_float = _float(value)
    return int(as_float) if as_float.is_integer() else value


def _resolution(value: Any) -> Any:
    """512, "512", "512x768", "512,768" or [512, 768] -> (width, height)."""
    parts = list(value) if isinstance(value, (list, tuple)) else re.split("[x×,]", str(value).lower())
    numbers = [int(_float(p)) for p in parts if not isinstance(p, bool) and _float(p).is_integer()]
    if len(numbers) != len(parts) or len(numbers) not in (1, 2):
        raise PydanticCustomError("resolution", "expected 512, 512x768 or [512, 768]")
    if min(numbers) < 64:
        raise PydanticCustomError("resolution_small", "sides must be at least 64")
    if max(numbers) > MAX_SIDE:
        raise PydanticCustomError("resolution_large", "sides must be at most 16384")
    return (numbers[0], numbers[-1])


def printable(text: str) -> str:
    r"""File names are bytes, and Python keeps those that are not UTF-8 as lone surrogates: here `\xe9`, as `ls` says it."""
    return "".join(_escaped(c) if "\ud800" <= c <= "\udfff" else c for c in text)


def _escaped(surrogate: str) -> str:
    code = ord(surrogate)
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def has_escapes(text: str) -> bool:
    r"""True for characters no path has, but that YAML makes of a double-quoted "C:\treino\novo" (\t \n \N \L \P \_)."""
    return any(c == "\xa0" or unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in text)


def _path(value: Any) -> Any:
    """Plain text; paths.py resolves it against the folder of the file it was written in."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        if has_escapes(value):
            raise PydanticCustomError("control_character", "control character in a path")
        return value.strip()
    return value


def _text(value: Any) -> Any:
    """Text that YAML may have read as a number (`nome: 2024`). Half characters cannot be written to any file."""
    if isinstance(value, str) and printable(value) != value:
        raise PydanticCustomError("surrogate", "text that is not UTF-8")
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


RULE = {"alvo": "target", "rank": "rank", "alfa": "alpha", "taxa": "rate"}
"""Portuguese name -> the name used in code, of what a rule about layers may say."""
_ABOVE_ZERO = {"rank": (int, 1024), "alpha": (float, 1_000_000), "rate": (float, 10)}


def _rule(value: Any) -> Any:
    """{alvo: expression, rank: 8, …} with the names used in code; what is not said is absent."""
    if not isinstance(value, dict) or "target" not in (named := {RULE.get(str(k), str(k)): v for k, v in value.items()}):
        raise PydanticCustomError("rule", "expected a rule")
    if named.keys() - {"target", *_ABOVE_ZERO} or len(named) < max(2, len(value)):
        raise PydanticCustomError("rule", "expected other keys")
    rule: dict[str, Any] = {"target": _text(named["target"])}
    if not isinstance(rule["target"], str) or not rule["target"]:
        raise PydanticCustomError("rule", "expected an expression")
    for key, (kind, largest) in _ABOVE_ZERO.items():
        if key in named:
            rule[key] = _above_zero(named[key], kind, largest)
    return rule


def _above_zero(value: Any, kind: Any, largest: float) -> Any:
    number = _float((_integer if kind is int else _number)(value))
    if not 0 < number <= largest or (kind is int and not number.is_integer()):
        raise PydanticCustomError("rule", "expected a number above zero")
    return kind(number)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


# The string in each type is its kind, which loading reads to know how to treat what the user wrote; a mapping is its words.
Boolean = Annotated[bool, BeforeValidator(_boolean), "boolean"]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False), "number"]
Integer = Annotated[int, BeforeValidator(_integer), "integer"]
Switch = Annotated[Literal["auto", "yes", "no"], BeforeValidator(_switch), YES_NO_WORDS]
"""The program decides, unless the user does."""
Free = Annotated[dict[str, Any], BeforeValidator(typed)]
"""Names and values that a library knows, not we."""
Share = Annotated[float | Literal["auto", "no"], BeforeValidator(_share), "share", NO_WORDS]
"""A part of a whole, from 0 to 1; `no` is 0."""
Tokens = Annotated[int | Literal["auto"], BeforeValidator(_tokens), "tokens"]
"""Of a caption."""
Resolution = Annotated[tuple[int, int], BeforeValidator(_resolution), "resolution"]
Text = Annotated[str, BeforeValidator(_text), "text"]
LocalPath = Annotated[str, BeforeValidator(_path), "local_path"]
"""A path of a file or folder, resolved at load; keys of this type may not hold a hub id."""
Folder = Annotated[str, BeforeValidator(_path), "folder"]
OutputFolder = Annotated[str, BeforeValidator(_path), "output_folder"]
"""Made when needed, but it must be possible to write there."""
PathOrHub = Annotated[str, BeforeValidator(_path), "path_or_hub"]
"""A path if it looks like one or exists, else a Hugging Face id `owner/name`."""
Rules = Annotated[list[Annotated[dict[str, Any], BeforeValidator(_rule)]], BeforeValidator(_listed)]
"""What holds for some layers: {"target": expression, "rank": …, "alpha": …, "rate": …}."""
