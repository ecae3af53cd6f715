"""A plugin is a file: `familia: sdxl` means families/sdxl/family.py. Nothing is registered anywhere."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType


def available(package: str) -> list[str]:
    """Names of a package's public modules, found without importing them (`package` as in "lora_trainer.families")."""
    folder = Path(__file__).parent.joinpath(*package.split(".")[1:])
    return sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    assert name in available(package), f"{package} has no {name}"
    return importlib.import_module(f"{package}.{name}")
