"""A user's folder in miniature: a tiny base with random weights, images with captions, and a config file."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from helpers import bases
from helpers.original_checkpoint import write_folder, write_single_file
from PIL import Image

from lora_trainer.cli import main

ROOT = Path(__file__).parents[2]
SIZES = [(64, 64), (64, 64), (64, 64), (128, 64), (64, 128), (64, 64)]


def make(folder: Path, release: str = "sd1", *, single_file: bool = True, **sections: dict[str, Any]) -> Path:
    """Write base, images and `lora.yaml`; `sections` (treino={…}) are laid over the usual ones."""
    base = write_base(folder, release, single_file=single_file)
    draw_images(folder / "fotos")
    config: dict[str, dict[str, Any]] = {
        "modelo": {**base, "classificacao_lora": 4, "alfa_lora": 8},
        "dados": {"diretorio_dados": "fotos", "resolucao": 64, "tamanho_lote": 2},
        "treino": {"epocas": 3, "taxa_aprendizado": 1e-2, "passos_acumulacao_gradiente": 2},
        "saida": {"nome": "lora", "precisao": "fp32"},
        "sistema": {"semente": 7, "dispositivo": "cpu"},
    }
    if release == "sd2":
        config["modelo"]["tipo_predicao"] = "epsilon"
    for name, options in sections.items():
        config[name] = {**config.get(name, {}), **options}
    path = folder / "lora.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    return path


def write_base(folder: Path, release: str, *, single_file: bool) -> dict[str, str]:
    """The options of `modelo` that name it. Of transformer families, single files are those of ComfyUI's users."""
    if release in bases.NAMES and single_file:
        options, _ = bases.of(release).write_files(folder)
        return {english: os.path.relpath(path, folder) for english, path in options.items()}
    if single_file:
        write_single_file(folder / "base.safetensors", release)
        return {"modelo_base": "base.safetensors", "tokenizador": "words"}
    write = bases.of(release).write_folder if release in bases.NAMES else partial(write_folder, release=release)
    write(folder / "base")
    return {"modelo_base": "base"}


def draw_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, (width, height) in enumerate(SIZES):
        pixels = np.random.default_rng(zlib.crc32(bytes([index]))).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"a photo of a cat {index}, red", encoding="utf-8")


def run(path: Path, *words: str) -> int:
    """The command line, in this process."""
    return main(["--config", str(path), *words])


def events(folder: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Rows of metricas.jsonl: the events of one name, or all optimizer steps."""
    rows = [json.loads(line) for line in (folder / "metricas.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if (row.get("event") == name if name else "loss" in row)]


def start(path: Path, *words: str) -> "subprocess.Popen[str]":
    """The command line, in a process of its own that may be killed."""
    command = [sys.executable, str(ROOT / "treinar.py"), "--config", str(path), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))


def kill_after_step(process: "subprocess.Popen[str]", folder: Path, step: int, number: int = signal.SIGKILL) -> None:
    """Send a signal once metricas.jsonl shows the step; fails if the process ends before."""
    metrics = folder / "metricas.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text(encoding="utf-8")):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.01)
    process.send_signal(number)
    process.wait()
