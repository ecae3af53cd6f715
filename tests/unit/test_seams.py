"""The loop, the techniques and the order of a run know no family: what differs is behind the seams."""

import re
from pathlib import Path

import pytest

import lora_trainer
from lora_trainer import plugins

PACKAGE = Path(lora_trainer.__file__).parent
NEUTRAL = ["run.py", "training.py", "loop.py", "setup.py", "planning.py", "modality.py", "checkpoint.py"]
FILES = [PACKAGE / name for name in NEUTRAL] + sorted((PACKAGE / "memory").glob("*.py"))
FILES += sorted((PACKAGE / "adapters").glob("*.py"))
FAMILIES = plugins.available("lora_trainer.families")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_familys_name_is_in_it(path: Path) -> None:
    code = "\n".join(line.partition("#")[0] for line in path.read_text(encoding="utf-8").splitlines())
    found = [name for name in FAMILIES if re.search(rf"[\"'.]{name}\b", code)]
    assert not found, f"{path.name} knows {found}"


def test_the_families_are_found() -> None:
    assert {"sd15", "sdxl", "causal_lm"} <= set(FAMILIES)
