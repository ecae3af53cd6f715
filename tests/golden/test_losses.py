"""The loss curve of each family on its tiny recipe, as it was when it was right: a memory or speed change must not move it.

A change that is meant to move it rewrites the file: python tests/golden/test_losses.py
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("losses.json")
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
RELEASES = ("sd1", "sd2", "sdxl", "flux")
TRAINING = {"flux": {"peso_niveis": "cosmap", "orientacao": 2}}
"""Options that the family's loss depends on; the others predict noise."""
NOISE = {"gama_min_snr": 5, "deslocamento_ruido": 0.05}


def losses(folder: Path, release: str) -> list[float]:
    from recipe import events, make, run

    config = make(folder, release, treino=TRAINING.get(release, NOISE), modelo={"alvos_lora": "tudo"})
    assert run(config) == 0
    return [row["loss"] for row in events(folder / "saida" / "lora")]


@pytest.mark.parametrize("release", RELEASES)
def test_loss_curve(tmp_path, release):
    expected = json.loads(FILE.read_text())[release]
    assert losses(tmp_path, release) == pytest.approx(expected, rel=1e-4)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    found = {}
    for name in RELEASES:
        with tempfile.TemporaryDirectory() as place:
            found[name] = losses(Path(place), name)
    FILE.write_text(json.dumps(found, indent=1) + "\n")
