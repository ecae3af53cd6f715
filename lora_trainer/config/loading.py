"""A YAML file and `a.b=v` arguments to a checked `Config`, or one report with everything that is wrong.

Later sources win: defaults < preset < files named by `herda:` < the file < the command line. Within one source an
option is set once; what it says under `familias:` is stronger than the rest of it. Torch is never imported on this
path, so `preset: auto` is left open here: `Loaded.with_preset` loads again once a preset has been chosen.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError, set_language, t
from . import interpolation, messages, names, notices, paths, presets, rules
from .entries import Entry, Sheet
from .fields import printable, value_of, with_values
from .names import Key
from .reading import read_arguments, read_file
from .report import Problem, Source, Where, command_line, report
from .schema import Config
from .yaml_text import MAX_BYTES, decode

NO_FILE = "sem_arquivo.yaml"
"""Names the run where no file does."""
REQUIRED: tuple[Key, ...] = (("model", "base_model"), ("data", "data_dir"))

_LANGUAGE_LINE = re.compile(r"""^\s+(?:idioma|language)\s*:\s*["']?(pt|en)\b""", re.MULTILINE)
_LANGUAGE_ARGUMENT = re.compile(r"(?:sistema|system)\.(?:idioma|language)=(pt|en)")


@dataclass(frozen=True)
class Loaded:
    """A config that passed every check, with the origin of each value."""

    config: Config
    """Paths absolute, sides rounded to what fits, `output.name` filled in."""
    path: Path
    name: str
    """Of the LoRA and of its run folder: `output.name`."""
    origins: dict[str, str] = field(default_factory=dict)
    """`treino.epocas` -> `arquivo.yaml:12`, "linha de comando", "padrão"; every option is there."""
    notices: list[str] = field(default_factory=list)
    preset: str | None = None
    """The preset that lies beneath ("8gb"), None without one."""
    family: str | None = None
    """Of the base, where it had to be known: a preset or `familias:` is in force."""
    written: frozenset[Key] = frozenset()
    """What the user set, in files or arguments; the rest is the preset's or the default."""
    again: Callable[..., "Loaded"] | None = field(default=None, repr=False, compare=False)

    def located(self, where: str) -> str:
        """`meu.yaml:12: modelo.vae` for the `where` of an error, if it is an option that the user set."""
        option = names.by_shown(where)
        if option is None or option.key not in self.written:
            return where
        return f"{self.origins[option.shown('pt')]}: {where}"

    @property
    def run_dir(self) -> Path:
        return Path(self.config.output.dir) / self.name

    @property
    def settled(self) -> frozenset[Key]:
        """Options that are the user's own and not `auto`: nobody else's to change."""
        return frozenset(key for key in self.written if value_of(self.config, key) != "auto")

    def with_preset(self, name: str) -> "Loaded":
        """The same sources over this preset. What the user wrote stays stronger."""
        assert self.again is not None, "made by hand, not by load"
        return self.again(preset=name)


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    extra: Sequence[tuple[str, Path]] = (),
    *,
    required: Sequence[Key] = REQUIRED,
    preset: str | None = None,
) -> Loaded:
    """Read and check everything; without a path, the arguments are all there is.

    `extra`: (label, YAML file) below the user's own, the later the stronger. `preset`: the one in force, whatever
    `memoria.preset` says. Raises ErrorReport with all problems of all sources, or ConfigError when the file itself cannot be read.
    """
    remarks: list[str] = []
    chain = _read_user(None if path is None else Path(path), overrides, remarks)
    main = chain[-1]
    path = Path(path or NO_FILE)
    user = [*chain, read_arguments(command_line(overrides, Path.cwd()))]
    sheets = [*(sheet for label, file in extra for sheet in _read_chain(file, label, remarks)), *user]
    entries = _merge(sheets)
    facts, problems, said = _check(entries, main.source)
    problems = [*(problem for sheet in sheets for problem in sheet.problems), *problems]
    if not any(sheet.broken for sheet in sheets):
        problems += _missing(required, entries, main)
    name = _name(facts, path, main.source, problems)
    problems += rules.inside_run_folder(facts, name)
    if problems:
        raise report(problems, str(path))
    asked = preset or facts.config.memory.preset
    chosen, family = None if asked in ("auto", "none") else asked, None
    if chosen or any(sheet.families for sheet in sheets):
        base = facts.config.model.base_or_architecture
        family = presets.family_of(base, facts.config.model.family)
        entries = _with_families(chosen, sheets, (family, base), remarks)
        facts, problems, said = _check(entries, main.source)
        if problems:
            raise report(problems, str(path))
    config, rounding, rounded = notices.rounded(facts)
    set_language(config.system.language)
    return Loaded(
        config=with_values(config, {("output", "name"): name}),
        path=path,
        name=name,
        origins=_origins(entries, rounding),
        notices=[*remarks, *said, *rounded, *notices.without_effect(facts)],
        preset=chosen,
        family=family,
        written=frozenset(_merge(user)),
        again=partial(load, path if main.source.is_file else None, overrides, extra, required=required),
    )


def _with_families(
    preset: str | None, sheets: Sequence[Sheet], base: tuple[str | None, str | None], remarks: list[str]
) -> dict[Key, Entry]:
    """All entries, now that the preset and the base (its family, where it is) are known."""
    family, path = base
    file = presets.path_of(preset) if preset else None
    ready = _read_chain(file, file.name, remarks) if file else []
    if problems := [problem for sheet in ready for problem in sheet.problems]:
        raise report(problems, str(file))
    size = presets.size_of(path, family) if presets.sized([*ready, *sheets], family) else None
    mine = _merge(presets.flatten(sheets, family, size))
    return _merge_entries(presets.yielding(_merge(presets.flatten(ready, family, size)), mine), mine)


# -- sources
def _read_user(path: Path | None, overrides: Sequence[str], remarks: list[str]) -> list[Sheet]:
    """The sheets of the user's file and of those it extends; an empty one where there is no file."""
    if path is None:
        set_language(_asked_language("", overrides))
        return [Sheet(command_line((), Path.cwd()))]
    text, _ = _read_text(path)
    set_language(_asked_language(text, overrides))
    return _read_chain(path, "", remarks)


def _read_text(path: Path) -> tuple[str, str]:
    wanted = t(pt="--config espera um arquivo YAML", en="--config wants a YAML file")
    if path.is_dir():
        raise ConfigError(t(pt=f"`{path}` é uma pasta", en=f"`{path}` is a folder"), wanted)
    if not path.exists():
        problem = t(pt=f"o arquivo de configuração `{path}` não existe", en=f"the config file `{path}` does not exist")
        raise ConfigError(problem, paths.near_matches(path.absolute()))
    if path.stat().st_size > MAX_BYTES:
        problem = t(pt=f"`{path}` é grande demais para uma configuração", en=f"`{path}` is too large for a config")
        raise ConfigError(problem, wanted)
    try:
        return decode(path.read_bytes(), path)
    except OSError as error:
        problem = t(pt=f"não consigo ler `{path}`: {error.strerror}", en=f"cannot read `{path}`: {error.strerror}")
        raise ConfigError(problem) from error


def _asked_language(text: str, overrides: Sequence[str]) -> str:
    """Found before anything is parsed, so that even a broken file is answered in its language."""
    for override in reversed(overrides):
        if match := _LANGUAGE_ARGUMENT.match(override):
            return match[1]
    found = _LANGUAGE_LINE.search(text)
    return found[1] if found else "auto"


def _read_chain(path: Path, label: str, remarks: list[str], seen: tuple[Path, ...] = ()) -> list[Sheet]:
    """The sheets of a file and of those it extends, weakest first; the file's own is the last."""
    text, notice = _read_text(path)
    if notice and notice not in remarks:
        remarks.append(notice)
    lines = tuple(text.splitlines())
    sheet = read_file(text, Source(str(path), label or printable(path.name), lines, path.absolute().parent))
    chain = [*seen, path.resolve()]
    below: list[Sheet] = []
    for written, where in sheet.extends:
        parent = Path(os.path.normpath(path.parent / os.path.expanduser(written)))
        if parent.resolve() in chain:
            circle = " -> ".join(p.name for p in [*chain, parent])
            sheet.refuse(where, pt=f"`herda` em círculo: {circle}", en=f"`extends` goes in a circle: {circle}")
            continue
        try:
            below += _read_chain(parent, label, remarks, tuple(chain))
        except ConfigError as error:
            sheet.problems.append(Problem(error.problem, where, error.hint))
    return [*below, sheet]


def _merge(sheets: Iterable[Sheet]) -> dict[Key, Entry]:
    """The strongest entry of each option; free-form mappings are joined key by key."""
    return reduce(_merge_entries, (sheet.entries for sheet in sheets), {})


def _merge_entries(weaker: Mapping[Key, Entry], stronger: Mapping[Key, Entry]) -> dict[Key, Entry]:
    merged = dict(weaker)
    for key, entry in stronger.items():
        below = merged.get(key)
        if below and isinstance(below.value, dict) and isinstance(entry.value, dict):
            entry = replace(entry, value={**below.value, **entry.value})
        merged[key] = entry
    return merged


# -- checks
def _check(entries: Mapping[Key, Entry], main: Source) -> tuple[rules.Facts, list[Problem], list[str]]:
    """(facts about a config in which what failed has its default, problems, notices)."""
    values, problems = interpolation.resolve(entries)
    values = {key: names.to_word(names.options()[key], value) for key, value in values.items()}
    outcome = paths.resolve_paths(values, entries, main)
    config, found, failed = _validate(values, entries)
    failed |= outcome.failed | (set(entries) - set(values))
    facts = rules.Facts(config, entries, frozenset(failed))
    return facts, [*problems, *outcome.problems, *found, *rules.contradictions(facts)], outcome.notices


def _validate(values: Mapping[Key, Any], entries: Mapping[Key, Entry]) -> tuple[Config, list[Problem], set[Key]]:
    try:
        return Config.model_validate(_nested(values)), [], set()
    except ValidationError as error:
        problems, failed = [], set()
        for detail in error.errors():
            key = (str(detail["loc"][0]), str(detail["loc"][1]))
            entry, deeper = entries[key], detail["loc"][2:]
            failed.add(key)
            message, hint = messages.explain(
                detail["type"], detail["input"], entry.option, entry.written, detail.get("ctx", {})
            )
            problems.append(Problem(message, _place(entry, deeper), hint))
    config = Config.model_validate(_nested({key: value for key, value in values.items() if key not in failed}))
    return config, problems, failed


def _nested(values: Mapping[Key, Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (section, name), value in values.items():
        nested.setdefault(section, {})[name] = value
    return nested


def _place(entry: Entry, deeper: Sequence[int | str]) -> Where:
    index = deeper[0] if deeper else None
    return entry.items[index] if isinstance(index, int) and index < len(entry.items) else entry.where


def _missing(required: Sequence[Key], entries: Mapping[Key, Entry], main: Sheet) -> Iterator[Problem]:
    for key in required:
        if key in entries and (entries[key].value is not None or entries[key].refused):
            continue
        option = names.options()[key]
        where = entries[key].where if key in entries else main.section_places.get(option.section)
        pt, en = f"falta `{option.shown('pt')}`", f"`{option.shown('en')}` is missing"
        yield Problem.at(where or Where(main.source), pt=pt, en=en, hint=option.doc)


def _name(facts: rules.Facts, path: Path, main: Source, problems: list[Problem]) -> str:
    key = ("output", "name")
    name = facts.config.output.name if facts.config.output.name is not None else path.stem
    if key not in facts.failed and (problem := rules.name_problem(name, facts.where(key) or Where(main))):
        problems.append(problem)
    return name


def _origins(entries: Mapping[Key, Entry], rounding: Mapping[Key, str]) -> dict[str, str]:
    default = t(pt="padrão", en="default")
    origins = {}
    for key, option in names.options().items():
        origin = entries[key].where.origin() if key in entries else default
        if key == ("output", "name") and key not in entries:
            origin = t(pt="nome do arquivo", en="the file's name")
        origins[option.shown("pt")] = f"{origin} ({rounding[key]})" if key in rounding else origin
    return origins
