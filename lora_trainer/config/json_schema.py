"""configs/schema.json for editors: both languages' names and words, with the documentation of each option.

`python -m lora_trainer.config.json_schema` writes it; a test says when it is out of date. It describes what may be
written (`"1e-4"`, `sim`, `512x768`), which is more than what pydantic's own schema of the values would allow.
"""

import json
import sys
from pathlib import Path
from typing import Any

from .. import plugins
from ..files.kinds import signatures
from . import names
from .fields import NO, YES, docs_of
from .names import Option
from .reading import EXTENDS, FAMILIES, HOLDER_PREFIX, SIZE, SIZES
from .schema import Config

DEFAULT_PATH = Path(__file__).parents[2] / "configs" / "schema.json"

_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def build() -> dict[str, Any]:
    definitions = {f"{option.section}.{option.name}": _option(option) for option in names.options().values()}
    sections = {section: _section(section) for section in names.sections()}
    properties = {name: _definition(section) for section, pt in names.sections().items() for name in (pt, section)}
    parents = {
        "description": "Outro arquivo, ou lista de arquivos, de onde partir.\nAnother file, or files, to start from.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    family = _mapping(
        "O que vale só para bases desta família.\nWhat holds only for bases of this family.",
        properties | dict.fromkeys(SIZES, _sizes(properties)),
    )
    families = _mapping(
        "Seções por família do modelo base.\nSections by the base's family.",
        {name: _definition("family") for name in plugins.available("lora_trainer.families")},
    )
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "lora-trainer",
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {f"^{HOLDER_PREFIX}": {}},
        "properties": properties | dict.fromkeys(EXTENDS, parents) | dict.fromkeys(FAMILIES, families),
        "definitions": {**definitions, **sections, "family": family},
    }


def _definition(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


def _mapping(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": description,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _sizes(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": "Até tantos bilhões de parâmetros: 4b, 10b, …\nUp to so many billion parameters: 4b, 10b, …",
        "type": "object",
        "additionalProperties": False,
        "patternProperties": {
            f"^{SIZE.pattern}$": {"type": "object", "additionalProperties": False, "properties": dict(properties)}
        },
    }


def _section(section: str) -> dict[str, Any]:
    accepted = names.spellings(section).items()
    properties = {word: _definition(f"{option.section}.{option.name}") for word, option in accepted}
    return _mapping("\n".join(docs_of(Config.model_fields[section])), properties)


def _option(option: Option) -> dict[str, Any]:
    forms = _forms(option)
    if option.many:
        forms = [{"type": "array", "items": {"anyOf": forms}}, *forms]
    if option.nullable:
        forms = [*forms, {"type": "null"}]
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    described = {"description": f"{option.doc_pt}\n{option.doc_en}", "anyOf": forms}
    return described if default is None else described | {"default": default}


_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}


def _forms(option: Option) -> list[dict[str, Any]]:
    """Everything that may be written for one value of the option."""
    if option.kind == "boolean":
        return [{"type": "boolean"}, {"enum": sorted(YES | NO)}, _REFERENCE]
    if option.kind == "choice":
        booleans = [{"type": "boolean"}] if "no" in option.choices else []
        return [_enum(*option.words, *option.choices), *booleans, _REFERENCE]
    if option.kind == "share":
        share = {"type": "number", "minimum": 0, "maximum": 1}
        return [share, _enum(*option.words, "auto", *sorted(YES | NO)), _REFERENCE]
    if option.kind == "tokens":
        lengths = {length for signature in signatures().values() for length in signature.caption_tokens}
        return [_enum("auto", *sorted(lengths)), _REFERENCE]
    if option.kind in ("integer", "number"):
        limits = {_LIMITS[name]: limit for name, limit in option.limits.items()}
        return [{"type": "number", **limits}, {"type": "string", "pattern": r"^[-+0-9.eE]+$"}, _REFERENCE]
    if option.kind == "resolution":
        side = {"type": "integer", "minimum": 64}
        pair = {"type": "array", "items": side, "minItems": 1, "maxItems": 2}
        return [side, pair, {"type": "string", "pattern": r"^\s*\d+(\s*[x×X,]\s*\d+)?\s*$"}, _REFERENCE]
    # Text keeps what is written, even where YAML sees a number.
    return [{"type": {"any": "object", "text": ["string", "number"]}.get(option.kind, "string")}]


def _enum(*words: Any) -> dict[str, Any]:
    return {"enum": list(dict.fromkeys(words))}


def text() -> str:
    return json.dumps(build(), ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text(), encoding="utf-8")
