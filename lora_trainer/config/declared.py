"""Options that techniques declare in their own files (techniques/<name>.py), and what they say against other options.

The files are found by name. Their tops import nothing heavy, so that a config is read without PyTorch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import create_model

from .. import plugins
from .fields import NO_WORDS, Key, Section, Switch, option, value_of
from .fields import with_values as with_values
from .report import Both, filled

PACKAGE = "lora_trainer.techniques"


@dataclass(frozen=True)
class Declared:
    """An option of a technique. Several may declare the same one, each adding its own `value` to the words allowed."""

    key: Key
    pt: str
    docs: Both
    """{values} stands for the values that techniques add, the mildest first; {sized} for the same with their bits."""
    place: int
    """Among options that are listed to people: what costs time before what changes numbers."""
    phases: frozenset[str] = frozenset()
    """Of a run, in which it takes something off the card."""
    kind: Any = Switch
    """A type of fields.py; None where techniques add the values."""
    default: Any = "auto"
    elsewhere: str = ""
    """What other trainers call it."""
    steps: tuple[Any, ...] = ("yes",)
    """Its values from the mildest to the tightest, one rung each."""


@dataclass(frozen=True)
class Conflict:
    """Two options that cannot both be as they are; {first} and {second} stand for their names as written."""

    first: Key
    second: Key
    holds: Callable[[Any], bool]
    """Asked of a Config."""
    problem: Both
    hint: Both = ("", "")

    def told(self, first: str, second: str, config: Any) -> tuple[str, str]:
        """Problem and hint in the language in force, with the names of the options filled in."""
        told = {"first": first, "second": second, "c": config}
        return filled(self.problem, told), filled(self.hint, told)


@cache
def techniques() -> tuple[Any, ...]:
    """The class of every technique, by name of its file."""
    return tuple(plugins.load(PACKAGE, name).TECHNIQUE for name in plugins.available(PACKAGE))


@cache
def options() -> dict[Key, Declared]:
    """In the order in which they are listed to people."""
    found = {declared.key: declared for technique in techniques() for declared in technique.options}
    return dict(sorted(found.items(), key=lambda item: item[1].place))


def sharing(key: Key) -> list[Any]:
    """The techniques that one option switches, the mildest first."""
    found = [technique for technique in techniques() if key in [declared.key for declared in technique.options]]
    return sorted(found, key=lambda technique: technique.mildness)


def assembled(section: str) -> Callable[[type[Section]], type[Section]]:
    """A section of the schema with the options that techniques declare for it."""

    def with_options(plain: type[Section]) -> type[Section]:
        own = [declared for declared in options().values() if declared.key[0] == section]
        fields: dict[str, Any] = {declared.key[1]: (_kind(declared), _field(declared)) for declared in own}
        return create_model(plain.__name__, __base__=plain, __module__=plain.__module__, **fields)

    return with_options


def conflicts() -> Iterator[Conflict]:
    """What techniques refuse, and what they cannot do without."""
    for technique in techniques():
        for name, (pt, en) in technique.needs.items():
            yield _needs(technique, plugins.load(PACKAGE, name).TECHNIQUE, pt, en)
        yield from (_where_on(technique, conflict) for conflict in technique.excludes)


def _where_on(technique: Any, conflict: Conflict) -> Conflict:
    return replace(conflict, holds=lambda c: technique.is_on(c) and conflict.holds(c))


def _needs(technique: Any, needed: Any, pt: str, en: str) -> Conflict:
    problem = (f"`{{first}}` precisa de `{{second}}`: sem ele, {pt}", f"`{{first}}` needs `{{second}}`: without it, {en}")
    hint = ("use `{second}: auto`, ou `{first}: nao`", "use `{second}: auto`, or `{first}: no`")
    without = Conflict(technique.key, needed.key, lambda c: value_of(c, needed.key) == "no", problem, hint)
    return _where_on(technique, without)


def _kind(declared: Declared) -> Any:
    if declared.kind is not None:
        return declared.kind
    choices = ("auto", "no", *(technique.value for technique in reversed(sharing(declared.key))))
    return Annotated[Literal[choices], NO_WORDS]


def _field(declared: Declared) -> Any:
    pt, en = declared.docs
    if declared.kind is None:
        pt, en = with_listed(pt, declared.key, "ou"), with_listed(en, declared.key, "or")
    return option(declared.default, pt=declared.pt, elsewhere=declared.elsewhere, docs=f"pt: {pt}\nen: {en}")


def with_listed(text: str, key: Key, last: str) -> str:
    """`text` with the values of an option that techniques share in it; `last`: the word for "or"."""
    adding = sharing(key)
    values, sized = (str(technique.value) for technique in adding), (technique.sized() for technique in adding)
    return text.format(values=_enumerated([*values], last), sized=_enumerated([*sized], last))


def _enumerated(words: list[str], last: str) -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
