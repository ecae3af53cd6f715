"""pydantic's error codes as sentences in two languages: what came, what is allowed.

The codes are stable and few; test_config_messages provokes every one of them from the schema.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import t
from . import names
from .fields import MAX_SIDE, printable
from .names import Option
from .report import Both, filled
from .yaml_text import SINGLE_QUOTES

_GOT = ("{name}: esperava {wanted}, veio {shown}", "{name}: expected {wanted}, got {shown}")

_SENTENCES: dict[str, tuple[Both, Both]] = {
    "no value": (
        ("{name} está sem valor", "{name} has no value"),
        ("escreva um valor, ou apague a linha: vale o padrão", "write a value, or delete the line for the default")),
    "decimal_comma": (_GOT, ("use ponto: {fixed}", "use a point: {fixed}")),
    "control_character": (
        ("{name}: a barra invertida dentro de aspas duplas virou outro caractere",
         "{name}: the backslash inside double quotes became another character"), SINGLE_QUOTES),
    "too_short": (
        ("{name}: esperava pelo menos {min_length} itens na lista, mas há {actual_length}",
         "{name}: expected at least {min_length} items in the list, but there are {actual_length}"), ("", "")),
    "too_long": (
        ("{name}: esperava no máximo {max_length} itens na lista, mas há {actual_length}",
         "{name}: expected at most {max_length} items in the list, but there are {actual_length}"), ("", "")),
}  # fmt: skip
"""pydantic's code -> (message, hint), where it has a sentence of its own."""

_WANTED: dict[str, Both] = {
    "rule": (
        "regras com alvo e ao menos um de rank, alfa, taxa (maiores que zero)",
        "rules of a target and at least one of rank, alpha, rate (above zero)"),
    "resolution_small": ("lados de pelo menos 64 pixels", "sides of at least 64 pixels"),
    "resolution_large": (f"lados de no máximo {MAX_SIDE} pixels", f"sides of at most {MAX_SIDE} pixels"),
    "string_pattern_mismatch": ("auto, cpu, cuda ou cuda:N", "auto, cpu, cuda or cuda:N"),
    "surrogate": ("um texto em UTF-8", "a text in UTF-8"),
    "string_too_short": ("um texto não vazio", "a text that is not empty"),
}  # fmt: skip
"""pydantic's code -> what is wanted; for the others, by the option's kind:"""

_OF_KIND: dict[str, Both] = {
    "boolean": ("um destes: {words}", "one of: {words}"),
    "choice": ("um destes: {words}", "one of: {words}"),
    "share": ("{words} ou um número de 0 a 1", "{words} or a number from 0 to 1"),
    "integer": ("um número inteiro", "a whole number"),
    "number": ("um número", "a number"),
    "resolution": ("512, 512x768 ou [512, 768]", "512, 512x768 or [512, 768]"),
    "any": ("chaves e valores", "keys and values"),
    "tokens": ("auto ou um número de tokens", "auto or a number of tokens"),
}

_LIMITS: dict[str, Both] = {
    "ge": ("de no mínimo {ge}", "at least {ge}"),
    "gt": ("maior que {gt}", "greater than {gt}"),
    "le": ("de no máximo {le}", "at most {le}"),
    "lt": ("menor que {lt}", "less than {lt}"),
    "multiple_of": ("múltiplo de {multiple_of}", "a multiple of {multiple_of}"),
}
_BETWEEN = ("entre {ge} e {le}", "between {ge} and {le}")


def explain(code: str, value: Any, option: Option, written: str, context: Mapping[str, Any]) -> tuple[str, str]:
    """(message, hint) for a value that was refused."""
    lang = option.language_of(written)
    told = {"name": f"`{written.rsplit('.', 1)[-1]}`", "shown": _show(value), "wanted": _wanted(code, option, lang)}
    message, hint = _SENTENCES.get("no value" if value is None else code, (_GOT, ("", "")))
    own = _hint(value, option, lang) if message is _GOT else ""
    return filled(message, {**told, **context}), filled(hint, context) or own


def _wanted(code: str, option: Option, lang: str) -> str:
    if code in ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of"):
        return _range(option.limits)
    if option.kind in ("boolean", "choice"):  # whatever the code
        code = ""
    text = _WANTED.get(code) or _OF_KIND.get("number" if code == "decimal_comma" else option.kind)
    return filled(text or ("um texto", "a text"), {"words": ", ".join(option.allowed_words(lang))})


def _range(limits: Mapping[str, Any]) -> str:
    parts = [text for limit, text in _LIMITS.items() if limit in limits]
    if {"ge", "le"} <= limits.keys():
        parts = [_BETWEEN, *(text for text in parts if text not in (_LIMITS["ge"], _LIMITS["le"]))]
    return t(pt="um valor ", en="a value ") + t(pt=" e ", en=" and ").join(filled(text, limits) for text in parts)


def _hint(value: Any, option: Option, lang: str) -> str:
    if option.kind == "choice" and isinstance(value, str):
        spelled = {*option.allowed_words(lang), *(str(choice) for choice in option.choices)}
        return names.did_you_mean(names.nearest(value, spelled, 0.5)) or option.doc
    return option.doc


def _show(value: Any) -> str:
    text = printable(str(value))
    return f"`{text if len(text) <= 60 else text[:57] + '…'}`"
