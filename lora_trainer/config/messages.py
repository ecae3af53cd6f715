"""pydantic's error codes as sentences in two languages: what came, what is allowed.

The codes are stable and few; test_config_messages provokes every one of them from the schema.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import t
from . import names
from .fields import MAX_SIDE, printable
from .names import Option


def explain(code: str, value: Any, option: Option, written: str, context: Mapping[str, Any]) -> tuple[str, str]:
    """(message, hint) for a value that was refused."""
    name = f"`{written.rsplit('.', 1)[-1]}`"
    lang = option.language_of(written)
    if value is None:
        return _no_value(name)
    shown = _show(value)
    if code == "decimal_comma":
        fixed = str(context["fixed"])
        return _got(name, shown, t(pt="um número", en="a number")), t(
            pt=f"use ponto: {fixed}", en=f"use a point: {fixed}"
        )
    if code == "control_character":
        return _escapes(name)
    if code in ("too_short", "too_long"):
        return _length(name, context), ""
    wanted = _wanted(code, option, lang)
    return _got(name, shown, wanted), _hint(code, value, option, lang)


def _got(name: str, shown: str, wanted: str) -> str:
    return t(pt=f"{name}: esperava {wanted}, veio {shown}", en=f"{name}: expected {wanted}, got {shown}")


def _wanted(code: str, option: Option, lang: str) -> str:
    if code in _RANGE_CODES:
        return _range(option)
    if option.kind in ("boolean", "choice"):
        words = option.allowed_words(lang)
        return t(pt="um destes: ", en="one of: ") + ", ".join(words)
    if code == "rule":
        return t(
            pt="regras com alvo e ao menos um de rank, alfa, taxa (maiores que zero)",
            en="rules of a target and at least one of rank, alpha, rate (above zero)",
        )
    if code == "resolution_small":
        return t(pt="lados de pelo menos 64 pixels", en="sides of at least 64 pixels")
    if code == "resolution_large":
        return t(pt=f"lados de no máximo {MAX_SIDE} pixels", en=f"sides of at most {MAX_SIDE} pixels")
    if code == "string_pattern_mismatch":
        return t(pt="auto, cpu, cuda ou cuda:N", en="auto, cpu, cuda or cuda:N")
    if code == "surrogate":
        return t(pt="um texto em UTF-8", en="a text in UTF-8")
    if code == "string_too_short":
        return t(pt="um texto não vazio", en="a text that is not empty")
    if option.kind == "share":
        spelled = ", ".join(option.allowed_words(lang))
        return t(pt=f"{spelled} ou um número de 0 a 1", en=f"{spelled} or a number from 0 to 1")
    plain = {
        "tokens": t(pt="auto ou um número de tokens", en="auto or a number of tokens"),
        "integer": t(pt="um número inteiro", en="a whole number"),
        "number": t(pt="um número", en="a number"),
        "resolution": t(pt="512, 512x768 ou [512, 768]", en="512, 512x768 or [512, 768]"),
        "any": t(pt="chaves e valores", en="keys and values"),
    }
    return plain.get(option.kind, t(pt="um texto", en="a text"))


_RANGE_CODES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of")


def _range(option: Option) -> str:
    limits = option.limits
    parts = []
    if "ge" in limits and "le" in limits:
        parts.append(t(pt=f"entre {limits['ge']} e {limits['le']}", en=f"between {limits['ge']} and {limits['le']}"))
    else:
        words = {
            "ge": t(pt="de no mínimo {}", en="at least {}"),
            "gt": t(pt="maior que {}", en="greater than {}"),
            "le": t(pt="de no máximo {}", en="at most {}"),
            "lt": t(pt="menor que {}", en="less than {}"),
        }
        parts += [text.format(limits[limit]) for limit, text in words.items() if limit in limits]
    if "multiple_of" in limits:
        parts.append(t(pt=f"múltiplo de {limits['multiple_of']}", en=f"a multiple of {limits['multiple_of']}"))
    return t(pt="um valor ", en="a value ") + t(pt=" e ", en=" and ").join(parts)


def _hint(code: str, value: Any, option: Option, lang: str) -> str:
    if option.kind == "choice" and isinstance(value, str):
        spelled = {*option.allowed_words(lang), *(str(choice) for choice in option.choices)}
        near = names.nearest(value, spelled, 0.5)
        return t(pt=f"você quis dizer `{near}`?", en=f"did you mean `{near}`?") if near else _doc(option, lang)
    return _doc(option, lang)


def _doc(option: Option, lang: str) -> str:
    return t(pt=option.doc_pt, en=option.doc_en)


def _no_value(name: str) -> tuple[str, str]:
    return (
        t(pt=f"{name} está sem valor", en=f"{name} has no value"),
        t(
            pt="escreva um valor, ou apague a linha: vale o padrão",
            en="write a value, or delete the line for the default",
        ),
    )


def _escapes(name: str) -> tuple[str, str]:
    return (
        t(pt=f"{name}: a barra invertida dentro de aspas duplas virou outro caractere",
          en=f"{name}: the backslash inside double quotes became another character"),
        t(pt="use aspas simples ou /: 'C:\\pasta\\arquivo' ou C:/pasta/arquivo",
          en="use single quotes or /: 'C:\\folder\\file' or C:/folder/file"),
    )  # fmt: skip


def _length(name: str, context: Mapping[str, Any]) -> str:
    low, high, got = context.get("min_length"), context.get("max_length"), context.get("actual_length")
    wanted = t(pt=f"pelo menos {low}", en=f"at least {low}") if low else t(pt=f"no máximo {high}", en=f"at most {high}")
    return t(
        pt=f"{name}: esperava {wanted} itens na lista, mas há {got}",
        en=f"{name}: expected {wanted} items in the list, but there are {got}",
    )


def _show(value: Any) -> str:
    text = printable(str(value))
    return f"`{text if len(text) <= 60 else text[:57] + '…'}`"
