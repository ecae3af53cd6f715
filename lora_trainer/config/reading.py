"""From a file or from `a.b=v` arguments to entries, in either language; nothing is validated here.

Every objection is collected in the sheet, so that one run tells all of them.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from .. import plugins
from ..errors import t
from . import names
from .entries import Entry, Sheet, is_null, pairs
from .names import Option
from .report import Source, Where
from .values import convert
from .yaml_text import compose

EXTENDS = ("herda", "extends")
FAMILIES = ("familias", "families")
"""Top-level key whose sections hold for bases of one family: `familias: {sdxl: {dados: {resolucao: 1024}}}`."""
SIZES = ("tamanhos", "sizes")
"""In a family: what holds for bases of up to so many billion parameters, `tamanhos: {4b: {...}, 10b: {...}}`. The smallest
that holds the base counts, for larger ones the last."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)b")
HOLDER_PREFIX = "x-"
"""Top-level keys `x-…` hold anchors for reuse and set nothing."""


def read_file(text: str, source: Source) -> Sheet:
    sheet = Sheet(source)
    try:
        root, problem = compose(text, source)
        if problem:
            sheet.broken = True
            sheet.problems.append(problem)
        elif isinstance(root, yaml.MappingNode):
            _read_root(root, sheet)
        elif root is not None and not is_null(root):
            sheet.broken = True
            pt, en = "o arquivo precisa ter seções no primeiro nível", "the file needs sections at its top level"
            sheet.refuse(root, pt=pt, en=en, hint=names.section_list())
    except RecursionError:
        sheet.refuse(Where(source), pt="âncora YAML que se repete sem fim", en="YAML anchor that never ends")
    return sheet


def read_arguments(source: Source) -> Sheet:
    sheet = Sheet(source)
    for line, argument in enumerate(source.lines):
        key, equals, _ = argument.partition("=")
        if equals:
            _read_argument(key.strip(), line, sheet)
            continue
        sheet.refuse(
            Where(source, line, 0, len(argument)),
            pt=f"esperava `chave=valor`, veio `{argument}`",
            en=f"expected `key=value`, got `{argument}`",
            hint=names.suggest(argument) if "." in argument else "",
        )
    return sheet


# -- files
def _read_root(root: yaml.MappingNode, sheet: Sheet) -> None:
    for key, value, inherited in pairs(root, sheet):
        name = key.value
        if name in EXTENDS:
            _read_extends(key, value, sheet)
        elif name in FAMILIES:
            _read_families(key, value, sheet)
        elif section := names.find_section(name):
            _read_section(section, key, value, sheet)
        elif not name.startswith(HOLDER_PREFIX) and not inherited:
            sheet.unknown(key, name, None)


def _read_extends(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if sheet.extends or not all(isinstance(n, yaml.ScalarNode) and not is_null(n) for n in nodes):
        sheet.refuse(
            key,
            pt=f"`{key.value}` espera um arquivo ou uma lista de arquivos, uma só vez",
            en=f"`{key.value}` wants a file or a list of files, once",
        )
        return
    sheet.extends = [(node.value.strip(), sheet.place(node)) for node in nodes]


def _read_families(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    if sheet.families or not (isinstance(value, yaml.MappingNode) or is_null(value)):
        pt, en = "familias: {sdxl: {dados: {resolucao: 1024}}}", "families: {sdxl: {data: {resolution: 1024}}}"
        sheet.refuse(
            key,
            pt=f"`{key.value}` espera famílias com suas seções abaixo, uma só vez",
            en=f"`{key.value}` wants families with their sections below, once",
            hint=t(pt=pt, en=en),
        )
        return
    known = plugins.available("lora_trainer.families")
    for name, body, _ in pairs(value, sheet):
        if name.value not in known:
            hint = t(pt="famílias: ", en="families: ") + ", ".join(known)
            sheet.refuse(name, pt=f"não conheço a família `{name.value}`", en=f"unknown family `{name.value}`", hint=hint)
        elif isinstance(body, yaml.MappingNode):
            sheet.families[name.value] = _read_family(body, sheet)


def _read_family(body: yaml.MappingNode, sheet: Sheet, *, sized: bool = True) -> Sheet:
    """A sheet of its own; what is wrong in it counts whichever family the base turns out to be."""
    inner = Sheet(sheet.source)
    for key, value, inherited in pairs(body, inner):
        if section := names.find_section(key.value):
            _read_section(section, key, value, inner)
        elif sized and key.value in SIZES:
            _read_sizes(key, value, inner)
        elif not inherited:
            inner.unknown(key, key.value, None)
    sheet.problems += inner.problems
    sheet.broken |= inner.broken
    inner.problems = []
    return inner


def _read_sizes(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    entries = list(pairs(value, sheet))
    for name, body, _ in entries:
        if (size := SIZE.fullmatch(name.value)) and isinstance(body, yaml.MappingNode):
            sheet.sizes[float(size[1])] = _read_family(body, sheet, sized=False)
    if not sheet.sizes or len(sheet.sizes) < len(entries):
        sheet.refuse(
            key,
            pt=f"`{key.value}` espera tamanhos em bilhões de parâmetros, com suas seções abaixo",
            en=f"`{key.value}` wants sizes in billions of parameters, with their sections below",
            hint="tamanhos: {4b: {memoria: {quantizacao_base: nf4}}, 10b: …}",
        )


def _read_section(section: str, key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    place = sheet.place(key)
    first = sheet.section_places.setdefault(section, place)
    if first is not place:
        hint = t(pt="junte as duas em uma", en="join the two")
        pt, en = f"a seção `{key.value}` aparece duas vezes", f"section `{key.value}` appears twice"
        sheet.refuse(place, pt=pt, en=en, hint=hint, also=first)
    elif isinstance(value, yaml.MappingNode):
        _read_options(section, key.value, value, sheet)
    elif not is_null(value):
        sheet.broken = True
        sheet.refuse(
            value,
            pt=f"`{key.value}` é uma seção: espera chaves abaixo dela",
            en=f"`{key.value}` is a section: it wants keys below",
            hint=t(
                pt="escreva as chaves nas linhas seguintes, com recuo e um espaço depois de `:`",
                en="write the keys on the next lines, indented, with a space after `:`",
            ),
        )


def _read_options(section: str, written: str, body: yaml.MappingNode, sheet: Sheet) -> None:
    for key, node, inherited in sorted(pairs(body, sheet), key=lambda pair: pair[2]):
        option = names.find_option(section, key.value)
        if option is None:
            sheet.unknown(key, key.value, section)
        elif not (inherited and option.key in sheet.entries):
            _read_option(option, f"{written}.{key.value}", key, node, sheet)


def _read_option(option: Option, written: str, key: yaml.ScalarNode, node: yaml.Node, sheet: Sheet) -> None:
    before = len(sheet.problems)
    value = convert(node, option, sheet)
    # An empty value has no width, and YAML may place it on the next line: point at its key.
    where = sheet.place(key if is_null(node) and not node.value else node)
    items = tuple(sheet.place(n) for n in node.value) if isinstance(node, yaml.SequenceNode) else ()
    sheet.add(Entry(option, written, value, sheet.place(key), where, items, refused=len(sheet.problems) > before))


# -- command line
def _read_argument(key: str, line: int, sheet: Sheet) -> None:
    argument = sheet.source.lines[line]
    key_where = Where(sheet.source, line, 0, argument.index("="))
    first, *rest = key.split(".")
    section = names.find_section(first)
    option = names.find_option(section, rest[0]) if section and rest else None
    if key in EXTENDS:
        hint = t(pt="escreva `herda:` no arquivo de configuração", en="write `extends:` in the config file")
        sheet.refuse(key_where, pt=f"`{key}` só vale em arquivo", en=f"`{key}` works only in a file", hint=hint)
    elif option is None or (rest[1:] and option.kind != "any"):
        sheet.unknown(key_where, key, section if rest else None)
    else:
        where = Where(sheet.source, line, argument.index("=") + 1, len(argument))
        _set_from_argument(option, key, rest[1:], where, sheet)


def _set_from_argument(option: Option, key: str, deeper: Sequence[str], where: Where, sheet: Sheet) -> None:
    before = len(sheet.problems)
    value = _argument_value(where.source.lines[where.line][where.start :], option, where, sheet)
    for name in reversed(deeper):
        value = {name: value}
    earlier = sheet.entries.get(option.key)
    if deeper and earlier and isinstance(earlier.value, dict) and deeper[0] not in earlier.value:
        earlier.value.update(value)
        return
    key_where = Where(where.source, where.line, 0, where.start - 1)
    sheet.add(Entry(option, key, value, key_where, where, refused=len(sheet.problems) > before))


def _argument_value(text: str, option: Option, where: Where, sheet: Sheet) -> Any:
    """Read as YAML, except that text is text: the shell's quotes are gone, so `foto: azul` needs no others."""
    inner = Sheet(replace(sheet.source, lines=(text,)))
    node, problem = compose(text, inner.source)
    if option.kind in ("text", *names.PATH_KINDS) and text.strip() and not _written_as_yaml(node, option):
        return [text] if option.many else text
    value = None if node is None else convert(node, option, inner)
    sheet.problems += [replace(found, where=where, also=None) for found in ([problem] if problem else inner.problems)]
    return value


def _written_as_yaml(node: yaml.Node | None, option: Option) -> bool:
    """True for quoted text, null, and a list where one is wanted."""
    if isinstance(node, yaml.ScalarNode):
        return node.style is not None or is_null(node)
    return isinstance(node, yaml.SequenceNode) and option.many and bool(node.flow_style)
