"""Every text for people follows the language in force, the names of the options in it too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lora_trainer
from lora_trainer.config import names

PACKAGE = Path(lora_trainer.__file__).parent
ROOMS = ("bases", "config", "data", "diffusion", "families", "files", "text")
FILES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
NAME = re.compile(r"\b[a-z]+\.[a-z_0-9]+\b")


def texts(node: ast.AST, side: str = "") -> Iterator[tuple[str, str, int]]:
    """(text, "pt" or "en" or "" outside `t(pt=…, en=…)`, line) of every string that is no docstring."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, side, node.lineno
    for child in ast.iter_child_nodes(node):
        spoken = isinstance(child, ast.keyword) and child.arg in ("pt", "en", "doc_pt", "doc_en")
        yield from texts(child, str(child.arg)[-2:] if spoken else side)


def misplaced(source: str) -> list[str]:
    """Portuguese option names that an English reader would meet, and the other way round."""
    found = []
    for text, side, line in texts(ast.parse(source)):
        for word in NAME.findall(text):
            option = names.by_shown(word)
            if option is None or option.shown("pt") == option.shown("en"):
                continue
            if (word == option.shown("pt") and side != "pt") or (word == option.shown("en") and side == "pt"):
                found.append(f"{line}: {word}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_option_names_are_in_the_language_of_their_text(path: Path) -> None:
    assert misplaced(path.read_text(encoding="utf-8")) == []


def test_a_misplaced_name_is_found() -> None:
    assert misplaced('raise Error(t(pt="a", en="use dados.resolucao"), where="modelo.vae")') == [
        "1: dados.resolucao",
        "1: modelo.vae",
    ]
    assert misplaced('t(pt="dados.resolucao", en="data.resolution")') == []
