"""Benchmarks are run by hand, and seldom: what they import must be there."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_what_they_import_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lora_trainer"):
            module = importlib.import_module(str(node.module))
            for name in (one.name for one in node.names):
                assert hasattr(module, name) or importlib.import_module(f"{module.__name__}.{name}")
