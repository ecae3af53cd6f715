"""The loop, the techniques and the order of a run know no family: what differs is behind the seams."""

import re
from pathlib import Path

import pytest

import lora_trainer
from lora_trainer import plugins

PACKAGE = Path(lora_trainer.__file__).parent
NEUTRAL = ["run/run.py", "run/training.py", "loop.py", "run/setup.py", "run/planning.py", "journal/checkpoint.py"]
FILES = [PACKAGE / name for name in NEUTRAL]
ROOMS = ["engine", "techniques", "planner", "runtime", "modality", "adapters", "layouts"]
FILES += [path for room in ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]
FAMILIES = plugins.available("lora_trainer.families")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_familys_name_is_in_it(path: Path) -> None:
    code = "\n".join(line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
    found = [name for name in FAMILIES if re.search(rf"[\"'.]{name}\b", code)]
    assert not found, f"{path.name} knows {found}"


def test_the_families_are_found() -> None:
    assert {"sd15", "sdxl", "causal_lm"} <= set(FAMILIES)
