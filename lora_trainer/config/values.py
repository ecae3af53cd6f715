"""YAML nodes to values, by the kind of option: scalars stay text until pydantic reads them.

So `nome: 2024-01-01` and `017` keep what was typed, `"1e-4"` and `1e-4` are one number, and what YAML 1.1 would quietly
turn into another number is refused. Only the free-form `argumentos_otimizador` takes the types OmegaConf gives.
"""

import re
from typing import Any

import yaml

from ..errors import t
from . import names
from .entries import Sheet, is_null, pairs
from .names import Option

_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "map", "seq")
}
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_SEXAGESIMAL = re.compile(r"[-+]?\d[\d_]*(:[0-5]?\d)+(\.\d*)?")


def convert(node: yaml.Node, option: Option, sheet: Sheet) -> Any:
    if option.kind == "any":
        return _free(node, sheet)
    if isinstance(node, yaml.SequenceNode) and (option.many or option.kind == "resolution"):
        return [_scalar(item, option, sheet) for item in node.value]
    value = _scalar(node, option, sheet)
    return [value] if option.many and value is not None else value


def _scalar(node: yaml.Node, option: Option, sheet: Sheet) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        return _not_a_scalar(node, option, sheet)
    _check_tag(node, sheet)
    if is_null(node):
        return None
    if option.kind in names.NUMBER_KINDS or option.choices:
        _check_number(node, sheet)
    return node.value


def _not_a_scalar(node: yaml.Node, option: Option, sheet: Sheet) -> None:
    read = ("uma lista", "a list") if isinstance(node, yaml.SequenceNode) else ("`chave: valor`", "`key: value`")
    name = option.shown().split(".")[1]
    if option.kind == "text":
        hint = t(pt="se é texto, ponha entre aspas simples", en="if it is text, put it in single quotes")
    else:
        hint = t(pt="escreva um valor só", en="write a single value")
    sheet.refuse(
        node,
        pt=f"`{name}` espera um valor só, mas o YAML leu {read[0]}",
        en=f"`{name}` wants one value, but YAML read {read[1]}",
        hint=hint,
    )


def _free(node: yaml.Node, sheet: Sheet) -> Any:
    """A value of free type, read as OmegaConf reads it."""
    _check_tag(node, sheet)
    if isinstance(node, yaml.MappingNode):
        return {key.value: _free(value, sheet) for key, value, _ in pairs(node, sheet)}
    if isinstance(node, yaml.SequenceNode):
        return [_free(item, sheet) for item in node.value]
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or "${" in node.value:
        return node.value
    _check_number(node, sheet)
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(f"value: {node.value}"))["value"]


def _check_number(node: yaml.ScalarNode, sheet: Sheet) -> None:
    """Refuse what YAML 1.1 reads as octal (0123 = 83) or in base 60 (16:9 = 969)."""
    text = node.value
    if node.style is not None:
        return
    if _OCTAL.fullmatch(text):
        plain = text.replace("_", "").lstrip("+-0") or "0"
        sheet.refuse(
            node,
            pt=f"`{text}` começa com zero, e o YAML o lê em base 8",
            en=f"`{text}` starts with zero, and YAML reads it in base 8",
            hint=t(pt=f"escreva {plain}", en=f"write {plain}"),
        )
    elif _SEXAGESIMAL.fullmatch(text):
        pt = f"escreva um número; se é texto, ponha entre aspas: '{text}'"
        sheet.refuse(
            node,
            pt=f"`{text}` não é um número: o YAML o leria em base 60",
            en=f"`{text}` is not a number: YAML would read it in base 60",
            hint=t(pt=pt, en=f"write a number; if it is text, quote it: '{text}'"),
        )


def _check_tag(node: yaml.Node, sheet: Sheet) -> None:
    if node.tag in _PLAIN_TAGS:
        return
    shown = node.tag.replace("tag:yaml.org,2002:", "!!")
    hint = t(
        pt="apague a etiqueta; se faz parte do texto, ponha tudo entre aspas simples",
        en="delete the tag; if it is part of the text, put all of it in single quotes",
    )
    sheet.refuse(node, pt=f"a etiqueta `{shown}` não é aceita", en=f"the tag `{shown}` is not accepted", hint=hint)
