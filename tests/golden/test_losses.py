"""The loss curve of each family on its tiny recipe, as it was when it was right: a memory or speed change must not move it.

A change that is meant to move it rewrites the file: python tests/golden/test_losses.py [family…]; without one, for all.
"""

# ruff: noqa: E402
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("losses.json")
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "recipes")]

from helpers import bases

TRAINING: dict[str, dict[str, Any]] = {
    **{name: {"gama_min_snr": 5, "deslocamento_ruido": 0.05} for name in ("sd1", "sd2", "sdxl")},
    **{name: dict(bases.of(name).tiny.training) for name in bases.NAMES},
}
"""Release -> options that its loss depends on."""


def losses(folder: Path, release: str) -> list[float]:
    from recipe import events, make, run

    config = make(folder, release, treino=TRAINING[release], modelo={"alvos_lora": "tudo"})
    assert run(config) == 0
    return [row["loss"] for row in events(folder / "saida" / "lora")]


@pytest.mark.parametrize("release", TRAINING)
def test_loss_curve(tmp_path, release):
    expected = json.loads(FILE.read_text())[release]
    assert losses(tmp_path, release) == pytest.approx(expected, rel=1e-4)


OF_FAMILY = {"sd15": ("sd1", "sd2")}
"""Releases of a family that is not called as its own."""

if __name__ == "__main__":
    found = json.loads(FILE.read_text())
    chosen = [name for word in sys.argv[1:] for name in OF_FAMILY.get(word, (word,))] or [*TRAINING]
    if unknown := set(chosen) - set(TRAINING):
        sys.exit(f"no golden losses of {', '.join(sorted(unknown))}; there are {', '.join(TRAINING)}")
    for name in chosen:
        with tempfile.TemporaryDirectory() as place:
            found[name] = losses(Path(place), name)
    FILE.write_text(json.dumps(found, indent=1) + "\n")
