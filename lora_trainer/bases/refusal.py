"""Why a base cannot be trained, said from what it is: each kind with its own way out."""

from .. import plugins
from ..errors import SourceError, t
from ..files.kinds import FAMILIES, UNKNOWN
from ..files.sources import Source


def refusal(source: Source) -> SourceError:
    """The error for a source that no family recognises."""
    kind, name = source.looks_like(), source.title()
    if kind is UNKNOWN:
        problem = t(
            pt=f"não reconheço o modelo {name}: os tensores dele não são de nenhuma família que eu treine",
            en=f"{name} is not recognised: its tensors are of no family that can be trained here",
        )
    else:
        problem = t(
            pt=f"{name} é {kind.title()}, que não serve de modelo base",
            en=f"{name} is {kind.title()}, no use as a base",
        )
    return SourceError(problem, str(kind.way_out or _what_can()), source.what)


def _what_can() -> str:
    titles = [plugins.load(f"{FAMILIES}.{name}", "family").FAMILY.title for name in plugins.available(FAMILIES)]
    known = ", ".join(titles)
    return t(pt=f"o que se treina aqui: {known}", en=f"what can be trained here: {known}")
