"""From a file or from `a.b=v` arguments to entries, in either language; nothing is validated here.

Every objection is collected in the sheet, so that one run tells all of them.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from .. import plugins
from ..errors import language, t
from . import names
from .entries import Entry, Sheet, add, complain, is_null, pairs, unknown, where_of
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
            complain(
                sheet,
                where_of(root, sheet),
                t(pt="o arquivo precisa ter seções no primeiro nível", en="the file needs sections at its top level"),
                _section_list(),
            )
    except RecursionError:
        complain(sheet, Where(source), t(pt="âncora YAML que se repete sem fim", en="YAML anchor that never ends"), "")
    return sheet


def read_arguments(source: Source) -> Sheet:
    sheet = Sheet(source)
    for line, argument in enumerate(source.lines):
        key, equals, _ = argument.partition("=")
        if not equals:
            complain(
                sheet,
                Where(source, line, 0, len(argument)),
                t(pt=f"esperava `chave=valor`, veio `{argument}`", en=f"expected `key=value`, got `{argument}`"),
                names.suggest(argument) if "." in argument else "",
            )
            continue
        _read_argument(key.strip(), line, sheet)
    return sheet


# -- files
def _read_root(root: yaml.MappingNode, sheet: Sheet) -> None:
    for key, value, inherited in pairs(root, sheet):
        name = key.value
        section = names.find_section(name)
        if name in EXTENDS:
            _read_extends(key, value, sheet)
        elif name in FAMILIES:
            _read_families(key, value, sheet)
        elif section:
            _read_section(section, key, value, sheet)
        elif not name.startswith(HOLDER_PREFIX) and not inherited:
            unknown(sheet, where_of(key, sheet), name, None)


def _read_extends(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if sheet.extends or not all(isinstance(n, yaml.ScalarNode) and not is_null(n) for n in nodes):
        complain(
            sheet,
            where_of(key, sheet),
            t(
                pt=f"`{key.value}` espera um arquivo ou uma lista de arquivos, uma só vez",
                en=f"`{key.value}` wants a file or a list of files, once",
            ),
            "",
        )
        return
    sheet.extends = [(node.value.strip(), where_of(node, sheet)) for node in nodes]


def _read_families(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    if sheet.families or not (isinstance(value, yaml.MappingNode) or is_null(value)):
        complain(
            sheet,
            where_of(key, sheet),
            t(
                pt=f"`{key.value}` espera famílias com suas seções abaixo, uma só vez",
                en=f"`{key.value}` wants families with their sections below, once",
            ),
            t(
                pt="familias: {sdxl: {dados: {resolucao: 1024}}}",
                en="families: {sdxl: {data: {resolution: 1024}}}",
            ),
        )
        return
    known = plugins.available("lora_trainer.families")
    for name, body, _ in pairs(value, sheet) if isinstance(value, yaml.MappingNode) else ():
        if name.value not in known:
            message = t(pt=f"não conheço a família `{name.value}`", en=f"unknown family `{name.value}`")
            complain(sheet, where_of(name, sheet), message, t(pt="famílias: ", en="families: ") + ", ".join(known))
        elif isinstance(body, yaml.MappingNode):
            sheet.families[name.value] = _read_family(body, sheet)


def _read_family(body: yaml.MappingNode, sheet: Sheet, *, sized: bool = True) -> Sheet:
    """A sheet of its own; what is wrong in it counts whichever family the base turns out to be."""
    inner = Sheet(sheet.source)
    for key, value, inherited in pairs(body, inner):
        section = names.find_section(key.value)
        if section:
            _read_section(section, key, value, inner)
        elif sized and key.value in SIZES:
            _read_sizes(key, value, inner)
        elif not inherited:
            unknown(inner, where_of(key, inner), key.value, None)
    sheet.problems += inner.problems
    sheet.broken |= inner.broken
    inner.problems = []
    return inner


def _read_sizes(key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    entries = list(pairs(value, sheet)) if isinstance(value, yaml.MappingNode) else []
    for name, body, _ in entries:
        if (size := SIZE.fullmatch(name.value)) and isinstance(body, yaml.MappingNode):
            sheet.sizes[float(size[1])] = _read_family(body, sheet, sized=False)
    if sheet.sizes and len(sheet.sizes) == len(entries):
        return
    complain(
        sheet,
        where_of(key, sheet),
        t(
            pt=f"`{key.value}` espera tamanhos em bilhões de parâmetros, com suas seções abaixo",
            en=f"`{key.value}` wants sizes in billions of parameters, with their sections below",
        ),
        "tamanhos: {4b: {memoria: {quantizacao_base: nf4}}, 10b: …}",
    )


def _read_section(section: str, key: yaml.ScalarNode, value: yaml.Node, sheet: Sheet) -> None:
    if section in sheet.section_places:
        first = sheet.section_places[section]
        complain(
            sheet,
            where_of(key, sheet),
            t(pt=f"a seção `{key.value}` aparece duas vezes", en=f"section `{key.value}` appears twice"),
            t(pt="junte as duas em uma", en="join the two"),
            first,
        )
        return
    sheet.section_places[section] = where_of(key, sheet)
    if is_null(value):
        return
    if not isinstance(value, yaml.MappingNode):
        sheet.broken = True
        complain(
            sheet,
            where_of(value, sheet),
            t(
                pt=f"`{key.value}` é uma seção: espera chaves abaixo dela",
                en=f"`{key.value}` is a section: it wants keys below",
            ),
            t(
                pt="escreva as chaves nas linhas seguintes, com recuo e um espaço depois de `:`",
                en="write the keys on the next lines, indented, with a space after `:`",
            ),
        )
        return
    for option_key, node, inherited in sorted(pairs(value, sheet), key=lambda pair: pair[2]):
        option = names.find_option(section, option_key.value)
        if option is None:
            unknown(sheet, where_of(option_key, sheet), option_key.value, section)
        elif not (inherited and option.key in sheet.entries):
            _read_option(option, f"{key.value}.{option_key.value}", option_key, node, sheet)


def _read_option(option: Option, written: str, key: yaml.ScalarNode, node: yaml.Node, sheet: Sheet) -> None:
    before = len(sheet.problems)
    value = convert(node, option, sheet)
    key_where = where_of(key, sheet)
    # An empty value has no width, and YAML may place it on the next line: point at its key.
    where = key_where if is_null(node) and not node.value else where_of(node, sheet)
    items = tuple(where_of(n, sheet) for n in node.value) if isinstance(node, yaml.SequenceNode) else ()
    add(sheet, Entry(option, written, value, key_where, where, items, refused=len(sheet.problems) > before))


# -- command line
def _read_argument(key: str, line: int, sheet: Sheet) -> None:
    argument = sheet.source.lines[line]
    key_where = Where(sheet.source, line, 0, argument.index("="))
    where = Where(sheet.source, line, argument.index("=") + 1, len(argument))
    parts = key.split(".")
    section = names.find_section(parts[0])
    option = names.find_option(section, parts[1]) if section and len(parts) > 1 else None
    deeper = parts[2:]
    if key in EXTENDS:
        hint = t(pt="escreva `herda:` no arquivo de configuração", en="write `extends:` in the config file")
        complain(sheet, key_where, t(pt=f"`{key}` só vale em arquivo", en=f"`{key}` works only in a file"), hint)
    elif option is None or (deeper and option.kind != "any"):
        unknown(sheet, key_where, key, section if len(parts) > 1 else None)
    else:
        _set_from_argument(option, key, deeper, where, sheet)


def _set_from_argument(option: Option, key: str, deeper: Sequence[str], where: Where, sheet: Sheet) -> None:
    argument = where.source.lines[where.line]
    before = len(sheet.problems)
    value = _argument_value(argument.partition("=")[2], option, where, sheet)
    for name in reversed(deeper):
        value = {name: value}
    earlier = sheet.entries.get(option.key)
    if deeper and earlier and isinstance(earlier.value, dict) and deeper[0] not in earlier.value:
        earlier.value.update(value)
        return
    key_where = Where(where.source, where.line, 0, where.start - 1)
    add(sheet, Entry(option, key, value, key_where, where, refused=len(sheet.problems) > before))


def _argument_value(text: str, option: Option, where: Where, sheet: Sheet) -> Any:
    """Read as YAML, except that text is text: the shell's quotes are gone, so `foto: azul` needs no others."""
    inner = Sheet(Source(sheet.source.title, sheet.source.label, (text,), sheet.source.base_dir, is_file=False))
    node, problem = compose(text, inner.source)
    if option.kind in ("text", *names.PATH_KINDS) and text.strip() and not _written_as_yaml(node, option):
        return [text] if option.many else text
    if problem:
        complain(sheet, where, problem.message, problem.hint)
    if node is None:
        return None
    value = convert(node, option, inner)
    for found in inner.problems:
        complain(sheet, where, found.message, found.hint)
    return value


def _written_as_yaml(node: yaml.Node | None, option: Option) -> bool:
    """True for quoted text, null, and a list where one is wanted."""
    if isinstance(node, yaml.ScalarNode):
        return node.style is not None or is_null(node)
    return isinstance(node, yaml.SequenceNode) and option.many and bool(node.flow_style)


def _section_list() -> str:
    listed = names.sections().values() if language() == "pt" else names.sections()
    return t(pt="seções: ", en="sections: ") + ", ".join(listed)
