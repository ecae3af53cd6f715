"""Makes the environment and starts nothing: python instalar.py [--simular] [--idioma en] (in English: the same file).

Looks at the graphics card (nvidia-smi), chooses the PyTorch build that has kernels for it, makes `.venv`, installs into it and
writes `treinar.sh` and `treinar.bat`, which run treinar.py there. Only Python's standard library is needed. `--simular` or
`--dry-run` prints what it would do. Run again, it repairs: what is there already is kept.
"""

import argparse
import locale
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PYTHONS = ((3, 10), (3, 13))
"""The oldest and the newest that all wheels are made for."""
INDEX = "https://download.pytorch.org/whl/{}"
OLD_CARDS = "torch<2.15"
"""Kernels for Maxwell, Pascal and Volta end with CUDA 12 builds; PyTorch 2.14 is the last to bring cu126."""
BUILDS = ((580, "cu130"), (570, "cu128"), (525, "cu126"))
"""Least NVIDIA driver -> the newest CUDA build that it runs (NVIDIA's compatibility table, minor versions included)."""
OLDEST_CAPABILITY, TURING, BLACKWELL = (5, 0), (7, 5), (10, 0)


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int] | None
    """None where an old nvidia-smi does not say."""
    driver: int


@dataclass(frozen=True)
class Machine:
    """What the choice depends on; `amd` is a card's name."""

    system: str
    """As platform.system() says: Windows, Linux, Darwin."""
    python: tuple[int, int]
    gpus: tuple[Gpu, ...] = ()
    amd: str = ""
    smi: bool = False
    """nvidia-smi is there."""
    torch: str = ""
    """Of the environment that is there already, as torch.__version__ says: "2.13.0+cpu"."""


@dataclass(frozen=True)
class Choice:
    """`index`: of a CUDA build ("cu126"), "cpu", or "" for what PyPI has."""

    requirement: str
    index: str
    reason: str
    warnings: tuple[str, ...] = ()


_language = "pt"


def t(*, pt: str, en: str) -> str:
    return en if _language == "en" else pt


class Refusal(Exception):
    """Nothing was changed; the message says what to do."""


# -- looking


def look() -> Machine:
    system = platform.system()
    smi = _run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    old = "" if smi else _run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    gpus = tuple(_gpu(line) for line in (smi or old).splitlines() if line.count(",") >= 1)
    there = _environment_python().is_file()
    torch = _run([str(_environment_python()), "-c", "import torch; print(torch.__version__)"]) if there else ""
    return Machine(system, sys.version_info[:2], gpus, _amd(system), bool(shutil.which("nvidia-smi")), torch.strip())


def _run(command: Sequence[str]) -> str:
    """Its output; "" where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _gpu(line: str) -> Gpu:
    name, *middle, driver = (part.strip() for part in line.split(","))
    told = re.fullmatch(r"(\d+)\.(\d+)", middle[0]) if middle else None
    capability = (int(told[1]), int(told[2])) if told else capability_of(name)
    return Gpu(name, capability, int(re.match(r"\d*", driver)[0] or 0))  # type: ignore[index]


def capability_of(name: str) -> tuple[int, int] | None:
    """By the series in the name, for drivers that do not tell."""
    series = (
        (r"RTX (PRO )?50\d\d|RTX PRO", (12, 0)),
        (r"RTX 40\d\d|\bL4|\bL40|Ada", (8, 9)), (r"RTX 30\d\d|RTX A\d|\bA10\b|\bA40\b", (8, 6)),
        (r"\bA100|\bA30\b", (8, 0)), (r"RTX 20\d\d|GTX 16\d\d|\bT4\b|TITAN RTX|Quadro RTX", (7, 5)), (r"V100|TITAN V", (7, 0)),
        (r"GTX 10\d\d|\bP4\b|\bP40\b|TITAN X[p]?|MX[123]50", (6, 1)), (r"P100", (6, 0)), (r"GTX 9\d\d|GTX 750|\bM40\b", (5, 2)),
        (r"GTX [67]\d\d|\bK\d\d", (3, 5)),
    )  # fmt: skip
    return next((found for pattern, found in series if re.search(pattern, name, re.IGNORECASE)), None)


def _amd(system: str) -> str:
    if system == "Linux":
        listed = _run(["lspci"])
    elif system == "Windows":
        query = "(Get-CimInstance Win32_VideoController).Name"
        listed = _run(["powershell", "-NoProfile", "-Command", query])
    else:
        return ""
    found = re.search(r"(?:AMD/ATI\]|AMD) *(.*Radeon[^\r\n]*)", listed)
    return found[1].strip() if found else ""


def _environment_python() -> Path:
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return ROOT / ".venv" / folder / name


# -- choosing


def choose(machine: Machine) -> Choice:
    """The build of PyTorch for this machine. Raises Refusal where none would run."""
    low, high = PYTHONS
    if not low <= machine.python <= high:
        have = ".".join(map(str, machine.python))
        wanted = t(pt="instale o Python 3.12 de python.org", en="install Python 3.12 from python.org")
        raise Refusal(
            t(
                pt=f"o Python daqui é o {have}; são precisos 3.10 a 3.13: ",
                en=f"this Python is {have}; 3.10 to 3.13 will do: ",
            )
            + wanted
        )
    if machine.system == "Darwin":
        return Choice(
            "torch", "", t(pt="Mac: sem CUDA; treina no MPS ou na CPU", en="Mac: no CUDA; trains on MPS or on the CPU")
        )
    if machine.gpus:
        return _for_nvidia(machine)
    if machine.smi:
        text = t(
            pt="nvidia-smi está instalado, mas não responde: o driver não está carregado. Reinstale-o "
            "(nvidia.com/drivers), reinicie e rode de novo",
            en="nvidia-smi is installed but does not answer: the driver is not loaded. Reinstall it "
            "(nvidia.com/drivers), restart, run this again",
        )
        return Choice("torch", "cpu", t(pt="por ora, a versão de CPU", en="for now, the CPU build"), (text,))
    if machine.amd:
        text = t(
            pt=f"{machine.amd}: placas AMD não foram testadas aqui. Em Linux, a versão ROCm do PyTorch "
            f"(pytorch.org/get-started) roda o treino sem as "
            "técnicas que são só de CUDA; em Windows, use a CPU",
            en=f"{machine.amd}: AMD cards were not tried here. On Linux, PyTorch's ROCm build "
            f"(pytorch.org/get-started) trains without the techniques "
            "that are CUDA's alone; on Windows, use the CPU",
        )
        return Choice("torch", "cpu", t(pt="versão de CPU", en="the CPU build"), (text,))
    return Choice(
        "torch", "cpu", t(pt="sem placa NVIDIA: versão de CPU (lenta)", en="no NVIDIA card: the CPU build (slow)")
    )


def _for_nvidia(machine: Machine) -> Choice:
    best = max(machine.gpus, key=lambda gpu: gpu.capability or (0, 0))
    capability = best.capability or TURING
    if capability < OLDEST_CAPABILITY:
        text = t(
            pt=f"{best.name} é antiga demais para o PyTorch de hoje; será usada a CPU",
            en=f"{best.name} is too old for today's PyTorch; the CPU is used",
        )
        return Choice("torch", "cpu", t(pt="versão de CPU", en="the CPU build"), (text,))
    runnable = [build for least, build in BUILDS if best.driver >= least]
    wanted = "cu126" if capability < TURING else "cu128" if capability >= BLACKWELL else "cu126"
    if not runnable or (wanted == "cu128" and runnable[0] == "cu126"):
        least = next(least for least, build in BUILDS if build == wanted)
        raise Refusal(t(
            pt=f"o driver da {best.name} é o {best.driver}; é preciso o {least} ou mais novo: atualize-o "
            f"(nvidia.com/drivers) e rode de novo",
            en=f"the driver of {best.name} is {best.driver}; {least} or newer is needed: update it "
            f"(nvidia.com/drivers) and run this again",
        ))  # fmt: skip
    warnings = () if len(machine.gpus) == 1 else (_several(machine),)
    if capability < TURING:
        reason = t(
            pt=f"{best.name} (capacidade {_dotted(capability)}): só as versões cu126 ainda a atendem",
            en=f"{best.name} (compute capability {_dotted(capability)}): only cu126 builds still serve it",
        )
        return Choice(OLD_CARDS, "cu126", reason, warnings)
    return Choice("torch", runnable[0], f"{best.name}, driver {best.driver}", warnings)


def _several(machine: Machine) -> str:
    listed = ", ".join(gpu.name for gpu in machine.gpus)
    old = [gpu.name for gpu in machine.gpus if gpu.capability and gpu.capability < TURING]
    newest = max(gpu.capability or (0, 0) for gpu in machine.gpus)
    if old and newest >= TURING:
        return t(
            pt=f"placas: {listed}; a versão escolhida é a da mais nova, e {', '.join(old)} não treina com ela",
            en=f"cards: {listed}; the build is the newest card's, and {', '.join(old)} does not train with it",
        )
    return t(pt=f"placas: {listed}; o treino usa a mais livre", en=f"cards: {listed}; training takes the emptiest")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# -- doing


def steps(machine: Machine, choice: Choice) -> list[list[str]]:
    """Commands in their order; an environment that is whole already needs none for PyTorch."""
    python = str(_environment_python())
    pip = [python, "-m", "pip", "install"]
    index = ["--index-url", INDEX.format(choice.index)] if choice.index else []
    fits = machine.torch and (choice.index or "cpu") in machine.torch and not _too_new(machine.torch, choice)
    again = ["--force-reinstall"] if machine.torch and not fits else []
    torch = [] if fits else [[*pip, *again, choice.requirement, *index]]
    return [[*pip, "--upgrade", "pip"], *torch, [*pip, "-e", str(ROOT)]]


def _too_new(torch: str, choice: Choice) -> bool:
    """For a card that newer builds have no kernels for."""
    numbers = [int(part) for part in re.findall(r"\d+", torch)[:2]]
    return choice.requirement == OLD_CARDS and numbers >= [2, 15]


STARTERS = {
    "treinar.sh": '#!/bin/sh\nexec "$(dirname "$0")/.venv/bin/python" "$(dirname "$0")/treinar.py" "$@"\n',
    "treinar.bat": '@"%~dp0.venv\\Scripts\\python.exe" "%~dp0treinar.py" %*\r\n',
}


def install(machine: Machine, choice: Choice) -> int:
    if not _environment_python().is_file():
        venv.create(ROOT / ".venv", with_pip=True)
    for command in steps(machine, choice):
        print("$", " ".join(command), flush=True)
        if code := subprocess.run(command, check=False).returncode:
            print(
                t(
                    pt="falhou; corrija o que se lê acima e rode de novo",
                    en="failed; mend what is said above and run this again",
                ),
                file=sys.stderr,
            )
            return code
    for name, text in STARTERS.items():
        (ROOT / name).write_bytes(text.encode())
    if os.name != "nt":
        (ROOT / "treinar.sh").chmod(0o755)
    starter = "treinar.bat" if os.name == "nt" else "./treinar.sh"
    print(
        t(
            pt=f"pronto: {starter} --config configs/demo_imagem.yaml",
            en=f"done: {starter} --config configs/demo_imagem.yaml",
        )
    )
    return 0


def main(words: Sequence[str] | None = None) -> int:
    global _language
    parser = argparse.ArgumentParser(prog="instalar.py", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--simular", "--dry-run", dest="simulate", action="store_true")
    parser.add_argument("--idioma", "--lang", dest="language", choices=("pt", "en"))
    arguments = parser.parse_args(words)
    spoken = os.environ.get("LORA_TRAINER_LANG") or os.environ.get("LANG") or (locale.getlocale()[0] or "")
    _language = arguments.language or ("pt" if spoken.lower().startswith(("pt", "portug")) else "en")
    machine = look()
    try:
        choice = choose(machine)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 2
    for line in (choice.reason, *choice.warnings):
        print(line)
    if not arguments.simulate:
        return install(machine, choice)
    for command in steps(machine, choice):
        print("$", " ".join(command))
    print(t(pt="grava:", en="writes:"), ", ".join(STARTERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
