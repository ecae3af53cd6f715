"""instalar.py's choices for a matrix of cards and systems; nothing is installed."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("instalar", ROOT / "instalar.py")
instalar = importlib.util.module_from_spec(spec)
sys.modules["instalar"] = instalar
spec.loader.exec_module(instalar)
Gpu, Machine = instalar.Gpu, instalar.Machine

PASCAL, TURING, AMPERE, BLACKWELL = (
    Gpu("NVIDIA GeForce GTX 1060 6GB", (6, 1), 580), Gpu("NVIDIA GeForce GTX 1660 SUPER", (7, 5), 580),
    Gpu("NVIDIA GeForce RTX 3060", (8, 6), 581), Gpu("NVIDIA GeForce RTX 5070", (12, 0), 576),
)  # fmt: skip
PYTHON = (3, 12)


def machine(*gpus, system="Windows", **more):
    return Machine(system, more.pop("python", PYTHON), tuple(gpus), smi=bool(gpus) or more.pop("smi", False), **more)


@pytest.fixture(autouse=True)
def english(monkeypatch):
    monkeypatch.setattr(instalar, "_language", "en")


@pytest.mark.parametrize(
    ("there", "requirement", "index"),
    [
        (machine(AMPERE), "torch", "cu130"),
        (machine(AMPERE, system="Linux"), "torch", "cu130"),
        (machine(TURING), "torch", "cu130"),
        (machine(BLACKWELL), "torch", "cu128"),
        (machine(Gpu("RTX 3060", (8, 6), 531)), "torch", "cu126"),
        (machine(PASCAL), "torch<2.15", "cu126"),
        (machine(Gpu("Tesla V100", (7, 0), 570), system="Linux"), "torch<2.15", "cu126"),
        (machine(PASCAL, AMPERE), "torch", "cu130"),
        (machine(Gpu("GTX 680", (3, 0), 470)), "torch", "cpu"),
        (machine(system="Linux"), "torch", "cpu"),
        (machine(system="Darwin"), "torch", ""),
        (machine(system="Linux", amd="Radeon RX 7900"), "torch", "cpu"),
        (machine(system="Windows", smi=True), "torch", "cpu"),
    ],
)
def test_the_build_for_the_card(there, requirement, index):
    choice = instalar.choose(there)
    assert (choice.requirement, choice.index) == (requirement, index)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (machine(Gpu("RTX 3060", (8, 6), 472)), "driver of RTX 3060 is 472; 525 or newer"),
        (machine(Gpu("RTX 5070", (12, 0), 560)), "570 or newer"),
        (machine(AMPERE, python=(3, 9)), "3.10 to 3.13"),
        (machine(AMPERE, python=(3, 14)), "3.10 to 3.13"),
    ],
)
def test_what_cannot_be_made_to_run_is_refused(there, told):
    with pytest.raises(instalar.Refusal, match=told):
        instalar.choose(there)


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (machine(PASCAL, AMPERE), "GTX 1060 6GB does not train"),
        (machine(AMPERE, TURING), "takes the emptiest"),
        (machine(system="Linux", amd="Radeon RX 7900"), "ROCm"),
        (machine(system="Windows", smi=True), "driver is not loaded"),
        (machine(Gpu("GTX 680", (3, 0), 470)), "too old"),
    ],
)
def test_what_the_user_must_know_is_told(there, told):
    assert any(told in warning for warning in instalar.choose(there).warnings)


@pytest.mark.parametrize(
    ("torch", "again"),
    [("2.13.0+cu130", None), ("2.13.0+cpu", True), ("", False), ("2.13.0+cu126", True)],
)
def test_what_is_there_already_is_kept_if_it_is_right(torch, again):
    there = machine(AMPERE, torch=torch)
    commands = [" ".join(step) for step in instalar.steps(there, instalar.choose(there))]
    [*before, last] = commands
    assert last.endswith(f"-e {ROOT}")
    wanted = [step for step in before if "torch" in step.split()]
    assert len(wanted) == (0 if again is None else 1)
    assert all(("--force-reinstall" in step) is again for step in wanted)


def test_a_card_that_newer_builds_forgot_gets_an_older_one():
    there = machine(PASCAL, torch="2.15.0+cu126")
    assert any("--force-reinstall torch<2.15" in " ".join(step) for step in instalar.steps(there, instalar.choose(there)))


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("NVIDIA GeForce RTX 3060, 8.6, 581.15", Gpu("NVIDIA GeForce RTX 3060", (8, 6), 581)),
        ("NVIDIA GeForce GTX 1060 6GB, 472.12", Gpu("NVIDIA GeForce GTX 1060 6GB", (6, 1), 472)),
        ("Tesla T4, [N/A], 535.104.05", Gpu("Tesla T4", (7, 5), 535)),
    ],
)
def test_what_nvidia_smi_says(line, gpu):
    assert instalar._gpu(line) == gpu


def test_simulating_changes_nothing(capsys, monkeypatch):
    monkeypatch.setattr(instalar, "look", lambda: machine(AMPERE))
    before = sorted(ROOT.iterdir())
    assert instalar.main(["--simular", "--idioma", "pt"]) == 0
    assert sorted(ROOT.iterdir()) == before
    assert "RTX 3060" in (told := capsys.readouterr().out)
    assert "grava: treinar.sh, treinar.bat" in told


def test_it_needs_nothing_but_the_standard_library():
    text = (ROOT / "instalar.py").read_text(encoding="utf-8")
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= sys.stdlib_module_names
