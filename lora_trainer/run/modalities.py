"""Which modality a run has: the family declares what it learns from, the run makes what handles it."""

from pathlib import Path
from typing import Any, cast

from ..config.schema import Config
from ..modality import Modality
from ..seam.family import Family


def modality_of(family: Family, config: Config, cache_dir: Path) -> Modality:
    """Data, previews and files of a run that trains this family."""
    if family.learns_from == "images":
        from ..data.modality import Images

        return Images(cast(Any, family), config, cache_dir)
    from ..text.modality import Texts

    return Texts(cast(Any, family), config)
