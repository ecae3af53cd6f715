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
    """(text, "pt" or "en" or "" outside `t(pt=…, en=…)`, line) of every string that is no docstring, and of an option's.

    Two texts in a tuple are Portuguese and English.
    """
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        pt, both, en = str(node.value.value).partition("\n    en: ")
        yield from ((pt, "pt", node.lineno), (en, "en", node.lineno)) if both and pt.startswith("pt: ") else ()
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, side, node.lineno
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and all(is_text(part) for part in node.elts):
        yield from (found for part, lang in zip(node.elts, ("pt", "en"), strict=True) for found in texts(part, side or lang))
        return
    for child in ast.iter_child_nodes(node):
        spoken = isinstance(child, ast.keyword) and child.arg in ("pt", "en", "hint_pt", "hint_en")
        yield from texts(child, str(child.arg)[-2:] if spoken else side)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


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
    assert misplaced('PAIR = ("veja dados.resolucao", "see data.resolution")') == []
    assert misplaced('PAIR = ("veja data.resolution", "see dados.resolucao")') == ["1: data.resolution", "1: dados.resolucao"]
    option = 'class A:\n    x: int = option(0)\n    """pt: veja %s.\n    en: see %s."""\n'
    assert misplaced(option % ("dados.resolucao", "data.resolution")) == []
    assert misplaced(option % ("data.resolution", "dados.resolucao")) == ["3: data.resolution", "3: dados.resolucao"]
