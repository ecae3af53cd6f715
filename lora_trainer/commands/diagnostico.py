"""`diagnostico`: what this machine has and whether it works; with a config, how its last run ended and what to change.

Every check is one line, OK, a warning or a failure, and reads the machine itself. Exit code 2 when something that
training needs is broken.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..config.loading import Loaded, load
from ..config.schema import TrainingConfig
from ..errors import MachineError, UserError, t
from ..machine.card import Card
from ..machine.hardware import Machine, choose_device, choose_precision
from ..machine.ram import Ram
from ..optim.optimizers import chosen, probe
from ..planner.picker import pick
from ..units import GIB, gib
from ._last_run import last_run_lines, read_last_run

State = Literal["ok", "warning", "failure"]
LIBRARIES = (
    "torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "huggingface-hub",
    "omegaconf", "pydantic", "pillow", "psutil",
)  # fmt: skip
LOW_DISK = 2 * GIB
IN_PORTUGUESE = {
    "system": "sistema",
    "choice": "escolha",
    "precision": "precisão",
    "libraries": "bibliotecas",
    "disk": "disco",
    "CLIP tokenizer": "tokenizador CLIP",
}


@dataclass(frozen=True)
class Check:
    name: str
    """English, also in JSON; the terminal shows IN_PORTUGUESE."""
    state: State
    text: str
    hint: str = ""

    def line(self) -> str:
        mark = {"ok": "OK   ", "warning": t(pt="AVISO", en="WARN "), "failure": t(pt="FALHA", en="FAIL ")}[self.state]
        hint = f"\n        {t(pt='dica', en='hint')}: {self.hint}" if self.hint else ""
        name = t(pt=IN_PORTUGUESE.get(self.name, self.name), en=self.name)
        return f"{mark}  {name}: {self.text}{hint}"


def show(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    loaded = load(arguments.config or None, settings, required=())
    machine = Machine.read()
    checks = examine(machine, loaded)
    record = read_last_run(loaded) if arguments.config else None
    lines = last_run_lines(record, loaded.config) if record else []
    if arguments.json:
        answer = {"checks": [dataclasses.asdict(check) for check in checks], "last_run": record and dataclasses.asdict(record)}
        print(json.dumps({**answer, "advice": lines}, ensure_ascii=False, indent=2))
    else:
        for text in [check.line() for check in checks] + ([""] if lines else []) + lines:
            print(text)
    return 2 if any(check.state == "failure" for check in checks) else 0


def examine(machine: Machine, loaded: Loaded) -> list[Check]:
    """All checks. The machine comes as a record; files, packages and RAM are looked at here."""
    return [
        _python(),
        _torch(machine),
        *(_card(card, machine) for card in machine.cards),
        *_use(machine, loaded),
        _eight_bit(machine, loaded),
        _libraries(),
        _memory(Ram.read()),
        _disk(Path(loaded.config.output.dir)),
        _tokenizer(loaded),
        _cache(loaded),
    ]


# -- machine


def _python() -> Check:
    return Check("system", "ok", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")


def _torch(machine: Machine) -> Check:
    """A build without CUDA is a failure only beside a driver: then there is a card that would go unused."""
    text = f"{machine.torch_version}, CUDA {machine.cuda_build or '—'}, driver {machine.driver or '—'}"
    if machine.cards:
        return Check("PyTorch", "ok", text)
    try:
        choose_device("cuda", machine)
    except MachineError as error:
        state: State = "failure" if machine.driver else "warning"
        return Check("PyTorch", state, f"{text}; {error.problem}", error.hint)
    raise AssertionError("a machine without cards offers no cuda device")


def _card(card: Card, machine: Machine) -> Check:
    name = f"cuda:{card.index}"
    capability = ".".join(map(str, card.capability))
    text = f"{card.name}, {t(pt='capacidade', en='capability')} {capability}, " + t(
        pt=f"{gib(card.free)} livres de {gib(card.total)}", en=f"{gib(card.free)} free of {gib(card.total)}"
    )
    if card.holders:
        text += "; " + ", ".join(map(str, card.holders))
    built = _architectures()
    if built and not supported(card.capability, built):
        hint = t(
            pt=f"este PyTorch foi feito para {', '.join(built)}; instale uma versão que inclua esta placa",
            en=f"this PyTorch was built for {', '.join(built)}; install a version that includes this card",
        )
        return Check(name, "failure", text, hint)
    return Check(name, "ok", text)


def _architectures() -> list[str]:
    return list(torch.cuda.get_arch_list()) if torch.cuda.is_available() else []


def supported(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Binary code runs on later minors of its major (sm_80 on 8.6); PTX (compute_90) on everything later."""
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built)):
        made = (int(major), int(minor))
        if made <= capability and (kind == "compute" or made[0] == capability[0]):
            return True
    return False


def _use(machine: Machine, loaded: Loaded) -> list[Check]:
    """The choice a run would make here: device, preset, precision."""
    try:
        choice = pick(loaded.config.memory, loaded.config.system.device, machine)
    except UserError as error:
        return [Check("choice", "failure", error.problem, error.hint)]
    precision = choose_precision(loaded.config.training.mixed_precision, choice.device, choice.card)
    checks = [Check("choice", "warning" if choice.notices and choice.card else "ok", choice.line())]
    state: State = "warning" if precision.notices else "ok"
    return [*checks, Check("precision", state, precision.name, "; ".join(precision.notices))]


def _eight_bit(machine: Machine, loaded: Loaded) -> Check:
    """One real step. Broken is a failure only for a config that asks for it."""
    settings = loaded.config.training
    wanted = chosen(settings).is_8bit
    try:
        device, _ = choose_device(loaded.config.system.device, machine)
        probe(settings if wanted else TrainingConfig(optimizer="adamw8bit"), device)
    except UserError as error:
        return Check("bitsandbytes", "failure" if wanted else "warning", error.problem, error.hint)
    return Check("bitsandbytes", "ok", t(pt="um passo de 8 bits funcionou", en="an 8-bit step worked"))


def _libraries() -> Check:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        text = t(pt="faltam ", en="missing: ") + ", ".join(missing)
        return Check("libraries", "failure", text, f"python -m pip install {' '.join(missing)}")
    return Check("libraries", "ok", ", ".join(found))


def _memory(ram: Ram) -> Check:
    text = t(
        pt=f"{gib(ram.available)} livres de {gib(ram.total)}, {gib(ram.swap)} de memória virtual livre",
        en=f"{gib(ram.available)} free of {gib(ram.total)}, {gib(ram.swap)} of swap free",
    )
    if ram.available + ram.swap < 4 * GIB:
        return Check("RAM", "warning", text, t(pt="feche outros programas", en="close other programs"))
    return Check("RAM", "ok", text)


def _disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = t(pt=f"{gib(free)} livres em {folder}", en=f"{gib(free)} free in {folder}")
    if free < LOW_DISK:
        return Check("disk", "warning", text, t(pt="libere espaço", en="free some space"))
    return Check("disk", "ok", text)


def _tokenizer(loaded: Loaded) -> Check:
    from ..bases import tokenizers

    cached = tokenizers.cached(tokenizers.HUB_PLACES, *tokenizers.CLIP_FILES)
    known = [loaded.config.model.tokenizer, cached, tokenizers._packaged()]
    places = [str(place) for place in known if place]
    if places:
        return Check("CLIP tokenizer", "ok", ", ".join(places))
    text = t(pt="nenhum neste computador", en="none on this computer")
    hint = t(
        pt="só arquivos únicos precisam: será baixado na primeira vez; sem internet, pip install openai-clip",
        en="only single files need one: it is downloaded the first time; without network, pip install openai-clip",
    )
    return Check("CLIP tokenizer", "warning", text, hint)


def _cache(loaded: Loaded) -> Check:
    folder = Path(loaded.config.data.cache_dir or Path(loaded.config.output.dir) / ".cache")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    return Check("cache", "ok", t(pt=f"{gib(size)} em {folder}", en=f"{gib(size)} in {folder}"))
