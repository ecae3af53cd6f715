"""`${treino.epocas}`, `${training.epochs}`, `${oc.env:NAME}`: OmegaConf resolves them, over defaults and all sources.

References are first rewritten to the English spelling, so that any spelling finds the option wherever it was set. Paths
also take `${HOME}`, a bare environment variable. Left out: relative references (`${.epocas}`).
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import t
from . import names
from .entries import Entry
from .names import Key
from .report import Problem

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_BARE = re.compile(r"(?<!\\)\$\{([A-Za-z_]\w*)\}")


def resolve(entries: Mapping[Key, Entry]) -> tuple[dict[Key, Any], list[Problem]]:
    """(value of every entry that resolves, problems). Refused entries are left out of both."""
    values = {key: entry.value for key, entry in entries.items() if not entry.refused}
    waiting = [key for key, value in values.items() if any("${" in text for text in _texts(value))]
    problems: list[Problem] = []
    if waiting:
        for key in list(waiting):
            before = len(problems)
            values[key] = _prepare(entries[key], problems)
            if len(problems) > before:
                del values[key]
                waiting.remove(key)
        _resolve_with_omegaconf(values, waiting, entries, problems)
    return values, problems


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    return {k: _map_texts(v, change) for k, v in value.items()} if isinstance(value, dict) else value


def _prepare(entry: Entry, problems: list[Problem]) -> Any:
    value = _map_texts(entry.value, lambda text: _REFERENCE.sub(_in_english, text))
    if entry.option.kind not in names.PATH_KINDS or not isinstance(value, str):
        return value

    def from_environment(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            problems.append(_no_variable(match[1], entry))
        # A literal "${" in the variable itself is not an interpolation.
        return os.environ.get(match[1], "").replace("${", r"\${")

    return _BARE.sub(from_environment, value)


def _in_english(match: re.Match[str]) -> str:
    section = names.find_section(match[1])
    option = names.find_option(section, match[2]) if section else None
    return "${" + f"{option.section}.{option.name}" if option else match[0]


def _resolve_with_omegaconf(
    values: dict[Key, Any], waiting: list[Key], entries: Mapping[Key, Entry], problems: list[Problem]
) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    for key in list(waiting):
        try:
            OmegaConf.create({"value": values[key]})
        except GrammarParseError:
            problems.append(_bad_grammar(entries[key]))
            del values[key]
            waiting.remove(key)
    tree: dict[str, dict[str, Any]] = {section: {} for section in names.sections()}
    for key, option in names.options().items():
        value = values.get(key, list(option.default) if isinstance(option.default, tuple) else option.default)
        tree[key[0]][key[1]] = value
    config = OmegaConf.create(tree)
    for key in waiting:
        try:
            value = config[key[0]][key[1]]
            values[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(_unresolved(entries[key], str(error)))
            del values[key]


def _bad_grammar(entry: Entry) -> Problem:
    return Problem(
        t(
            pt=f"`{entry.written}` tem `${{` sem uma referência válida",
            en=f"`{entry.written}` has `${{` without a valid reference",
        ),
        entry.where,
        t(
            pt=r"para o texto literal escreva `\${`; referência é `${secao.chave}`",
            en=r"for the literal text write `\${`; a reference is `${section.key}`",
        ),
    )


def _no_variable(name: str, entry: Entry) -> Problem:
    return Problem(
        t(pt=f"a variável de ambiente {name} não existe", en=f"the environment variable {name} does not exist"),
        entry.where,
        t(pt="defina-a antes de treinar, ou escreva o caminho", en="set it before training, or write the path"),
    )


def _unresolved(entry: Entry, detail: str) -> Problem:
    if variable := re.search(r"Environment variable '([^']*)'", detail):
        return _no_variable(variable[1], entry)
    reference = re.search(r"[Kk]ey '([^']*)'", detail)
    shown = reference[1] if reference else ""
    section = names.find_section(shown.split(".")[0]) if "." in shown else None
    if shown:
        why = t(pt=f"`{shown}` não é uma opção", en=f"`{shown}` is not an option")
    else:
        why = t(pt="referência circular ou inválida", en="circular or invalid reference")
    message = t(pt=f"`{entry.written}` não pôde ser resolvido", en=f"`{entry.written}` could not be resolved")
    hint = names.suggest(shown, section, moved=section is None) if shown else t(pt="escreva o valor", en="write the value")
    return Problem(f"{message}: {why}", entry.where, hint)
