"""Config files that ship with the families, each release under its name: `modelo.arquitetura: flux2_dev`, `llama-3.1-8b`.

They lie in families/<family>/arch/<release>/, as diffusers or transformers publishes them, without weights.
"""

from pathlib import Path

_FAMILIES = Path(__file__).parents[1] / "families"


def folder(release: str) -> Path | None:
    """The folder of a release; None where no family ships it."""
    return next(iter(_FAMILIES.glob(f"*/arch/{release}")), None)


def releases(family: str = "*") -> list[str]:
    """All names there are, of one family or of all."""
    return sorted(path.name for path in _FAMILIES.glob(f"{family}/arch/*") if path.is_dir())
