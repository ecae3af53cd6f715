"""The config as it took effect: every option, with the origin of its value, in a file that loads to the same config."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ..atomic import replacing
from ..errors import MachineError, t
from . import names
from .fields import map_texts, value_of
from .loading import Loaded
from .names import Option
from .schema import Config

_UNPRINTABLE = re.compile("[\x7f-\x9f\ud800-\udfff\u2028\u2029\ufeff\ufffe\uffff]")


def dump(config: Config, origins: Mapping[str, str], title: str = "") -> str:
    """YAML with the Portuguese names; `origins` become comments."""
    lines = [f"# {title}"] if title else []
    for section, section_pt in names.sections().items():
        lines.append(f"{section_pt}:")
        for option in (o for o in names.options().values() if o.section == section):
            text = f"  {option.pt}: {_value(value_of(config, option.key), option)}"
            origin = origins.get(option.shown("pt"), "")
            lines.append(f"{text}  # {origin}" if origin else text)
    return "\n".join(lines) + "\n"


def write(loaded: Loaded, path: Path) -> None:
    """Write atomically: the file is the old one or the new one, never half. Raises MachineError."""
    title = t(
        pt=f"Configuração efetiva de {loaded.name}; cada comentário diz de onde veio o valor.",
        en=f"Effective config of {loaded.name}; each comment tells where the value came from.",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
        with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(dump(loaded.config, loaded.origins, title))
    except OSError as error:
        raise MachineError(
            t(pt=f"não consegui gravar a configuração efetiva: {error}", en=f"cannot write the effective config: {error}"),
            t(pt="libere espaço ou mude saida.diretorio", en="free some space or change output.dir"),
            str(path),
        ) from error


def _remove_leftovers(path: Path) -> None:
    """What killed processes left; one that still runs may be writing its own."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(\d+)\.tmp")
    for beside in path.parent.iterdir():
        match = pattern.fullmatch(beside.name)
        if match and not psutil.pid_exists(int(match[1])):
            beside.unlink(missing_ok=True)


def _value(value: Any, option: Option) -> str:
    """JSON is YAML that no reader takes for something else: text is always quoted."""
    if isinstance(value, str) and value in (*option.choices, "no" if option.kind == "share" else ""):
        value = option.word(value, "pt")
    # A literal `${` must not come back as a reference.
    text = json.dumps(map_texts(value, lambda text: text.replace("${", r"\${")), ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

