"""Ready-made settings for a card size: which files there are, and what of them holds for a base.

A preset is a config file like any other, presets/8gb.yaml; it lies between the defaults and the user's file. Its
`familias:` sections need the base's family, and `tamanhos:` in them its size; the base's header tells both without torch.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .. import plugins
from ..errors import ConfigError, t
from ..files import kinds
from ..files.sources import open_source
from . import sizes
from .entries import Entry, Sheet
from .names import Key, options, shown

FOLDER = Path(__file__).parents[2] / "presets"

YIELDS: dict[Key, tuple[Key, ...]] = {
    ("training", "batch_size"): (("training", "gradient_accumulation_steps"),),
    ("training", "gradient_accumulation_steps"): (("training", "batch_size"),),
    ("training", "gradient_checkpointing"): (("memory", "block_streaming"),),
    ("training", "optimizer"): (("training", "use_8bit_optimizer"),),
    ("memory", "optimizer_in_backward"): (("training", "gradient_accumulation_steps"),),
}
"""What the user writes -> what a preset then leaves alone, because it would say something else beside it:
`tamanho_lote: 2` is an effective batch of 2, whatever the preset accumulates."""


def names() -> tuple[str, ...]:
    """From the smallest card to the largest: "4gb", …"""
    return tuple(choice for choice in options()["memory", "preset"].choices if choice not in ("auto", "none"))


def path_of(name: str) -> Path:
    """Raises ConfigError when the preset's file is missing."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(
            t(pt=f"falta o arquivo do preset {name}: {path}", en=f"the file of preset {name} is missing: {path}"),
            t(pt="use --preset nenhum, ou baixe o programa de novo", en="use --preset none, or download again"),
        )
    return path


def size_gib(name: str) -> int:
    """GiB of the card the preset is made for."""
    return int(name.removesuffix("gb"))


def family_of(base_model: str | None, family: str) -> str | None:
    """The family as written, else as the base's header or config tells it. Raises SourceError for a broken base."""
    if family != "auto" or not base_model:
        return None if family == "auto" else family
    return kinds.family_of(open_source(base_model, shown("model", "base_model")).looks_like())


def size_of(base_model: str | None, family: str | None = None) -> float | None:
    """Billions of parameters. Raises SourceError for a broken base."""
    return sizes.billions(open_source(base_model, shown("model", "base_model")), family) if base_model else None


def families() -> list[str]:
    """All families there are, told by their files' names."""
    return plugins.available("lora_trainer.families")


def sized(sheets: Sequence[Sheet], family: str | None) -> bool:
    """Whether what is said for the family depends on the base's size."""
    return any(sheet.families[family].sizes for sheet in sheets if family in sheet.families)


def flatten(sheets: Sequence[Sheet], family: str | None, size: float | None) -> Iterator[Sheet]:
    """Every sheet, followed by what it says for the family, and for its bases of this size (billions of parameters)."""
    for sheet in sheets:
        yield sheet
        if family in sheet.families:
            own = sheet.families[family]
            yield own
            if (bound := sizes.section_for(own.sizes, size)) is not None:
                yield own.sizes[bound]


def yielding(preset: Mapping[Key, Entry], written: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """The preset's entries, less those that give way to what the user wrote."""
    gone = {key for mine in written for key in YIELDS.get(mine, ())}
    return {key: entry for key, entry in preset.items() if key not in gone}
