"""Model families, found by the names of their folders. `resolve` picks the one that a base belongs to. Without torch."""

from dataclasses import replace
from typing import TYPE_CHECKING

from .. import plugins
from ..config.names import shown
from ..config.schema import DataConfig, ModelConfig
from ..errors import ConfigError, SourceError, t
from ..files.kinds import FAMILIES, UNKNOWN, family_of
from ..files.sources import Source, open_source

if TYPE_CHECKING:
    from ..seam.family import Family


def resolve(model: ModelConfig, data: DataConfig, *, planning: bool = False) -> "Family":
    """Open the base and check it against `modelo.familia`; a mismatch is an error, never a silent choice.

    `planning`: a folder of config files will do, and without any base the architecture that we ship for the family.
    """
    planned = planning and (model.architecture or model.family != "auto")
    if not model.base_model and not planned:
        raise ConfigError.said(
            pt="falta modelo.modelo_base",
            en="model.base_model is missing",
            hint_pt="dê um arquivo .safetensors, uma pasta do diffusers ou um id do Hugging Face",
            hint_en="give a .safetensors file, a diffusers folder or a Hugging Face id",
        )
    names = plugins.available(FAMILIES)
    if model.family != "auto" and model.family not in names:
        raise ConfigError(
            t(pt=f"não conheço a família {model.family!r}", en=f"unknown family {model.family!r}"),
            t(pt=f"use auto ou uma destas: {', '.join(names)}", en=f"use auto or one of: {', '.join(names)}"),
            shown("model", "family"),
        )
    base = model.base_or_architecture or str(family_class(model.family).shipped_architecture())
    source = replace(open_source(base, shown("model", "base_model")), planning=planning)
    found = family_of(source.looks_like())
    if found is None or not family_class(found).takes(source):
        raise refusal(source)
    chosen = family_class(found)
    if model.family not in ("auto", found):
        wanted = family_class(model.family).title
        raise SourceError.said(
            pt=f"familia: {model.family} ({wanted}), mas {source.title()} é {source.looks_like().title()}",
            en=f"family: {model.family} ({wanted}), but {source.title()} is {source.looks_like().title()}",
            hint_pt=f"escreva familia: {found} (ou auto), ou use um modelo base {wanted}",
            hint_en=f"set family: {found} (or auto), or use a {wanted} base",
            where=shown("model", "family"),
        )
    return chosen.open(source, model, chosen.chosen_tokens(data.max_caption_tokens))


def family_class(name: str) -> "type[Family]":
    family: type[Family] = plugins.load(f"{FAMILIES}.{name}", "family").FAMILY
    return family


def refusal(source: Source) -> SourceError:
    """Why a source that no family recognises cannot be trained, and the way out: each kind has its own."""
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
    known = ", ".join(family_class(name).title for name in plugins.available(FAMILIES))
    return t(pt=f"o que se treina aqui: {known}", en=f"what can be trained here: {known}")
