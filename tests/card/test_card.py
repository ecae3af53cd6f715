"""The pretended card (README.md here), checked in processes of its own: it must be loaded before torch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def by_itself(path: Path) -> Any:
    """A module without its package, which would load the library."""
    spec = importlib.util.spec_from_file_location(f"emucuda_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = by_itself(HERE / "emucuda" / "build.py")
pytestmark = pytest.mark.skipif(bool(build.impossible()), reason=str(build.impossible()))
WRITTEN_FOR = "2.13."
ONE_CARD = {"EMU_CARDS": "1"}
PROCESSES = {
    "card": (ONE_CARD, ["check_card.py", "check_allocator.py", "check_lives.py", "check_attention.py"]),
    "expandable": (
        {**ONE_CARD, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        ["check_expandable.py", "check_lives.py"],
    ),
    "two cards": ({"EMU_CARDS": "2"}, ["check_two_cards.py"]),
    "faults": (ONE_CARD, ["check_faults.py"]),
    "training": (ONE_CARD, ["check_training.py"]),
    "program": (ONE_CARD, ["check_program.py"]),
}


@pytest.fixture(scope="session")
def library():
    """Built once, then found by the hash of its sources."""
    try:
        return build.library()
    except RuntimeError as error:
        if not torch.__version__.startswith(WRITTEN_FOR):
            pytest.skip(f"written for torch {WRITTEN_FOR}, not for {torch.__version__}: {error}")
        raise


def environment(own: dict[str, str]) -> dict[str, str]:
    usual = {key: value for key, value in os.environ.items() if not key.startswith(("EMU_", "PYTORCH_"))}
    paths = [str(path) for path in (HERE, ROOT, ROOT / "tests", ROOT / "tests" / "recipes")]
    cache = {"EMU_CACHE": os.environ["EMU_CACHE"]} if "EMU_CACHE" in os.environ else {}
    return {**usual, **cache, **own, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", PROCESSES)
def test_on_the_card(name: str, tmp_path: Path):
    own, files = PROCESSES[name]
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")]
    paths = [str(HERE / "checks" / file) for file in files]
    command = [sys.executable, "-m", "emucuda", "-m", "pytest", *arguments, *paths]
    done = subprocess.run(
        command, cwd=ROOT, env=environment({**own, "LORA_TRAINER_CACHE": str(tmp_path)}), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
