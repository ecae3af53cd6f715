"""Builds libemucuda.so for the torch that is installed, once: kept by a hash of sources, flags and torch's version.

Never imports torch: the library must be loaded before it.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DAT_PER_OPERATOR_HEADERS")


def torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def impossible() -> str | None:
    """Why the library cannot be built here; None if it can."""
    folder = torch_folder()
    if sys.platform != "linux":
        return "Linux only"
    if compiler() is None:
        return "no C++ compiler (g++)"
    if folder is None or not (folder / "include" / "ATen").exists():
        return "torch's C++ headers are not installed"
    if "+cpu" not in _version(folder) and (folder / "lib" / "libtorch_cuda.so").exists():
        return "torch has CUDA itself"
    return None


def library() -> Path:
    """The path of the library, built if it is not there; EMU_CACHE names another folder than the user's cache."""
    folder = torch_folder()
    assert folder is not None, "no torch"
    place = Path(os.environ.get("EMU_CACHE") or Path.home() / ".cache" / "emucuda")
    path = place / f"libemucuda-{_key(folder)}.so"
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        _build(folder, path)
    return path


def _version(folder: Path) -> str:
    return (folder / "version.py").read_text(encoding="utf-8")


def _key(folder: Path) -> str:
    digest = hashlib.sha256(_version(folder).encode())
    digest.update(" ".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(folder: Path, path: Path) -> None:
    """Under another name first: two processes may build at once."""
    handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    include, lib = folder / "include", folder / "lib"
    where = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    link = [f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    command = [str(compiler()), *FLAGS, *where, str(SOURCES / "emucuda.cpp"), "-o", made, *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        Path(made).unlink()
        raise RuntimeError(f"emucuda does not compile:\n{done.stderr}")
    os.replace(made, path)


if __name__ == "__main__":
    print(impossible() or library())
