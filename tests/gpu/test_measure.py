"""The script for a card: its planning half runs anywhere; the rest only where there is one."""

import json
from pathlib import Path

import measure
import pytest
import torch

from lora_trainer.units import GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole script runs there")
def test_plans_are_made_without_a_card(tmp_path: Path, capsys):
    assert measure.main(["--only", "sd15:4", "--json", str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["fits"]
    assert found["seconds"] is None
    assert 0.5 * GIB < found["predicted"] < found["predicted_reserved"] < 4 * GIB
    assert "sd15 4 GiB" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_named(capsys):
    assert measure.main(["--minutes", "0", "--plan-only", "--only", "sdxl:6"]) == 0
    assert "no time left for: sdxl 6 GiB" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_prediction_on_a_card(tmp_path: Path):
    assert measure.main(["--only", "sd15:4", "--json", str(tmp_path / "found.json")]) == 0
    (found,) = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["allocated"] is not None
    assert found["reserved"] <= found["predicted_reserved"] <= 4 * GIB
    assert abs(found["allocated"] / found["predicted"] - 1) < 0.1
