"""`${treino.epocas}`, `${training.epochs}`, `${oc.env:NAME}`: OmegaConf resolves them, over defaults and all sources.

References are first rewritten to the English spelling, so that any spelling finds the option wherever it was set. Paths
also take `${HOME}`, a bare environment variable. Left out: relative references (`${.epocas}`).
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import t
from . import names
from .entries import Entry
from .fields import map_texts, value_of
from .names import Key
from .report import Problem

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_BARE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*)\}")


def resolve(entries: Mapping[Key, Entry]) -> tuple[dict[Key, Any], list[Problem]]:
    """(value of every entry that resolves, problems). Refused entries are left out of both."""
    values = {key: entry.value for key, entry in entries.items() if not entry.refused}
    problems: list[Problem] = []
    waiting = {key: values.pop(key) for key in list(values) if "${" in str(values[key])}
    for key in waiting:
        value, wrong = _prepare(entries[key])
        problems += wrong
        if not wrong:
            values[key] = value
    for key, resolved in _resolved(values, [key for key in waiting if key in values]) if waiting else ():
        if isinstance(resolved, Exception):
            problems.append(_unresolved(entries[key], str(resolved)))
            del values[key]
        else:
            values[key] = resolved
    return values, problems


def _resolved(values: Mapping[Key, Any], waiting: Sequence[Key]) -> Iterator[tuple[Key, Any]]:
    """(option, its value or the error that came instead) of those that wait, over defaults and all values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree: dict[str, dict[str, Any]] = {section: {} for section in names.sections()}
    for key, option in names.options().items():
        value = values.get(key, list(option.default) if isinstance(option.default, tuple) else option.default)
        tree[key[0]][key[1]] = value
    config = OmegaConf.create(tree)
    for key in waiting:
        try:
            value = value_of(config, key)
            yield key, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            yield key, error


def _prepare(entry: Entry) -> tuple[Any, list[Problem]]:
    """(value with references in English, what is wrong with it)."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    value = map_texts(entry.value, lambda text: _REFERENCE.sub(_in_english, text))
    if entry.option.kind in names.PATH_KINDS and isinstance(value, str):
        missing = [name for name in _BARE.findall(value) if name not in os.environ]
        if missing:
            return value, [_no_variable(name, entry) for name in missing]
        # A literal "${" in the variable itself is not an interpolation.
        value = _BARE.sub(lambda match: os.environ[match[1]].replace("${", r"\${"), value)
    try:
        OmegaConf.create({"value": value})
    except GrammarParseError:
        return value, [_bad_grammar(entry)]
    return value, []


def _in_english(match: re.Match[str]) -> str:
    section = names.find_section(match[1])
    option = names.find_option(section, match[2]) if section else None
    return "${" + f"{option.section}.{option.name}" if option else match[0]


def _bad_grammar(entry: Entry) -> Problem:
    return Problem.at(
        entry.where,
        pt=f"`{entry.written}` tem `${{` sem uma referência válida",
        en=f"`{entry.written}` has `${{` without a valid reference",
        hint=t(
            pt=r"para o texto literal escreva `\${`; referência é `${secao.chave}`",
            en=r"for the literal text write `\${`; a reference is `${section.key}`",
        ),
    )


def _no_variable(name: str, entry: Entry) -> Problem:
    return Problem.at(
        entry.where,
        pt=f"a variável de ambiente {name} não existe",
        en=f"the environment variable {name} does not exist",
        hint=t(pt="defina-a antes de treinar, ou escreva o caminho", en="set it before training, or write the path"),
    )


def _unresolved(entry: Entry, detail: str) -> Problem:
    if variable := re.search(r"Environment variable '([^']*)'", detail):
        return _no_variable(variable[1], entry)
    reference = re.search(r"[Kk]ey '([^']*)'", detail)
    if reference and reference[1]:
        section = names.find_section(reference[1].split(".")[0]) if "." in reference[1] else None
        why = t(pt=f"`{reference[1]}` não é uma opção", en=f"`{reference[1]}` is not an option")
        hint = names.suggest(reference[1], section, moved=section is None)
    else:
        why = t(pt="referência circular ou inválida", en="circular or invalid reference")
        hint = t(pt="escreva o valor", en="write the value")
    pt, en = f"`{entry.written}` não pôde ser resolvido: {why}", f"`{entry.written}` could not be resolved: {why}"
    return Problem.at(entry.where, pt=pt, en=en, hint=hint)
