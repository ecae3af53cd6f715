"""What the machine has, and the device and precision that follow from it.

Facts are read once into plain records (`Machine`, `Card`) and every decision is a function of records, so each rule can
be tried for cards that are not here. bf16 goes by compute capability, never by PyTorch's own boolean, which says yes to
cards that only emulate it. Left out: several cards at once, Apple's and Intel's devices.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import MachineError, t
from .card import Card, driver_version, read_card, read_cards

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

FP16_NAN_CARDS = re.compile(r"\b(GTX 16\d\d|T[456]00|T1000|T1200|MX450|MX550)\b")
"""TU116 and TU117 chips: capability 7.5 like the RTX 20 series, but fp16 convolutions return NaN."""


@dataclass(frozen=True)
class Machine:
    """What PyTorch was built for and what it finds."""

    cuda_build: str | None
    """CUDA or ROCm version PyTorch was built with; None for a CPU-only build."""
    cards: tuple[Card, ...] = ()
    system: str = "Linux"
    driver: str | None = None
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    torch_version: str = ""
    wsl: bool = False
    """Linux inside Windows: the driver, and its habits, are Windows'."""

    @property
    def spills(self) -> bool:
        """The driver moves what does not fit into shared memory instead of refusing it."""
        return self.system == "Windows" or self.wsl

    @classmethod
    def read(cls) -> "Machine":
        build = torch.version.cuda or torch.version.hip
        found = torch.cuda.device_count() if build and torch.cuda.is_available() else 0
        return cls(
            cuda_build=build,
            cards=read_cards(found),
            system=platform.system(),
            driver=driver_version(),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            torch_version=torch.__version__,
            wsl="microsoft" in platform.release().lower(),
        )


# -- device


def choose_device(setting: str, machine: Machine | None = None) -> tuple[torch.device, list[str]]:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`, and what to tell the user about it."""
    machine = machine or Machine.read()
    if setting == "cpu":
        return torch.device("cpu"), []
    if setting == "auto" and not machine.cards:
        return torch.device("cpu"), [_slow_cpu_notice(machine)]
    where = t(pt="sistema.dispositivo", en="system.device")
    if not machine.cards:
        raise MachineError(*_no_card(machine), where=where)
    if setting == "auto":
        return torch.device("cuda", emptiest(machine.cards).index), []
    index = int(setting.partition(":")[2] or 0)
    if index >= len(machine.cards):
        have = ", ".join(f"cuda:{i} ({card.name})" for i, card in enumerate(machine.cards))
        raise MachineError(
            t(pt=f"não existe a placa cuda:{index}", en=f"there is no card cuda:{index}"),
            t(pt=f"as placas desta máquina são: {have}", en=f"this machine's cards are: {have}"),
            where=where,
        )
    return torch.device("cuda", index), []


def emptiest(cards: Sequence[Card]) -> Card:
    """The card with most free memory, the first of equals."""
    return max(cards, key=lambda card: (card.free, -card.index))


def _slow_cpu_notice(machine: Machine) -> str:
    problem, hint = _no_card(machine)
    return t(
        pt=f"treinando na CPU, o que é muito mais lento ({problem}). Se há uma placa NVIDIA aqui: {hint}",
        en=f"training on the CPU, which is much slower ({problem}). If there is an NVIDIA card here: {hint}",
    )


def _no_card(machine: Machine) -> tuple[str, str]:
    """Problem and way out; a build without CUDA and a driver that shows no card are different troubles."""
    if machine.cuda_build is None:
        problem = t(
            pt=f"este PyTorch ({machine.torch_version}) foi instalado sem suporte a CUDA",
            en=f"this PyTorch ({machine.torch_version}) was installed without CUDA support",
        )
        return problem, _reinstall(machine.system)
    driver = machine.driver or t(pt="não encontrado", en="not found")
    seen = t(
        pt=f"PyTorch feito para CUDA {machine.cuda_build}, driver NVIDIA {driver}",
        en=f"PyTorch built for CUDA {machine.cuda_build}, NVIDIA driver {driver}",
    )
    if machine.visible is not None:
        seen += f", CUDA_VISIBLE_DEVICES={machine.visible!r}"
    problem = t(pt=f"o PyTorch não vê nenhuma placa: {seen}", en=f"PyTorch sees no card: {seen}")
    if machine.visible is not None and machine.visible.strip() in ("", "-1"):
        return problem, t(
            pt="a variável CUDA_VISIBLE_DEVICES esconde as placas: apague-a ou ponha CUDA_VISIBLE_DEVICES=0",
            en="the variable CUDA_VISIBLE_DEVICES hides the cards: unset it or set CUDA_VISIBLE_DEVICES=0",
        )
    return problem, t(
        pt="instale ou atualize o driver da NVIDIA e reinicie; `nvidia-smi` deve mostrar a placa e uma versão de CUDA "
        f"igual ou maior que {machine.cuda_build}",
        en="install or update the NVIDIA driver and reboot; `nvidia-smi` must show the card and a CUDA version of "
        f"{machine.cuda_build} or later",
    )


def _reinstall(system: str) -> str:
    remove = "python -m pip uninstall -y torch"
    if system == "Linux":
        command = f"{remove} && python -m pip install --no-cache-dir torch"
        return t(pt=f"reinstale a versão CUDA: {command}", en=f"reinstall the CUDA version: {command}")
    if system == "Darwin":
        return t(
            pt="no macOS não há CUDA; use sistema.dispositivo: cpu", en="macOS has no CUDA; set system.device: cpu"
        )
    return t(
        pt=f"reinstale a versão CUDA: {remove}, depois o comando `pip install torch --index-url …` que "
        "pytorch.org/get-started/locally mostra para Windows, Pip e a maior versão de CUDA",
        en=f"reinstall the CUDA version: {remove}, then the command `pip install torch --index-url …` that "
        "pytorch.org/get-started/locally shows for Windows, Pip and the latest CUDA version",
    )


# -- precision


@dataclass(frozen=True)
class Precision:
    """One answer for every component; trainable weights are float32 whatever it says."""

    compute: torch.dtype
    frozen: torch.dtype
    """Storage of the frozen base."""
    scaler: bool
    """fp16 gradients underflow without a loss scale."""
    notices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return NAMES[self.compute]


def choose_precision(setting: str, device: torch.device, card: Card | None = None) -> Precision:
    """`setting` is auto, fp16, bf16 or no. What the hardware cannot do right becomes auto's choice, and is told."""
    if device.type == "cpu":
        return _precision(*_for_cpu(setting))
    card = card or read_card(device.index or 0)
    best = _best(card)
    if setting in ("auto", "no") or _can(setting, card):
        return _precision(best if setting == "auto" else setting, _auto_notices(setting, best, card))
    return _precision(best, [_refusal(setting, best, card)])


def _precision(setting: str, notices: list[str]) -> Precision:
    dtype = DTYPES[setting]
    return Precision(dtype, dtype, scaler=setting == "fp16", notices=tuple(notices))


def _for_cpu(setting: str) -> tuple[str, list[str]]:
    if setting == "fp16":
        text = t(
            pt="precisao_mista: fp16 não existe na CPU; treinando em fp32",
            en="mixed_precision: fp16 does not exist on the CPU; training in fp32",
        )
        return "no", [text]
    return ("no" if setting == "auto" else setting), []


def _best(card: Card) -> str:
    return next((setting for setting in ("bf16", "fp16") if _can(setting, card)), "no")


def _can(setting: str, card: Card) -> bool:
    if setting == "bf16":
        return card.capability >= (8, 0)
    return card.capability >= (6, 0) and not FP16_NAN_CARDS.search(card.name)


def _auto_notices(setting: str, best: str, card: Card) -> list[str]:
    if setting != "auto" or best != "no":
        return []
    return [
        t(
            pt=f"{card.name} não calcula fp16 de forma confiável (perda NaN); treinando em fp32",
            en=f"{card.name} does not compute fp16 reliably (NaN loss); training in fp32",
        )
    ]


def _refusal(setting: str, best: str, card: Card) -> str:
    capability = ".".join(map(str, card.capability))
    used = "fp32" if best == "no" else best
    if setting == "bf16":
        return t(
            pt=f"precisao_mista: bf16 pede uma placa de capacidade 8.0 ou maior e {card.name} tem {capability}; "
            f"treinando em {used}",
            en=f"mixed_precision: bf16 needs a card of compute capability 8.0 or later and {card.name} has "
            f"{capability}; training in {used}",
        )
    return t(
        pt=f"precisao_mista: fp16 dá perda NaN em {card.name} (capacidade {capability}); treinando em {used}",
        en=f"mixed_precision: fp16 gives a NaN loss on {card.name} (compute capability {capability}); "
        f"training in {used}",
    )


# -- what the live modules really are


@dataclass(frozen=True)
class PartRow:
    """One line of the table "component / dtype / device"."""

    component: str
    dtype: str
    device: str
    parameters: int


def describe_parts(parts: Mapping[str, nn.Module] | nn.ModuleDict) -> list[PartRow]:
    """Rows read from the modules themselves: of each part the frozen weights, those packed in few bits, the trained."""
    rows = []
    for name, module in parts.items():
        kinds: dict[tuple[bool, bool], list[tuple[str, str, int]]] = {}
        for kind, weight in _weights(module):
            kinds.setdefault(kind, []).append(weight)
        for (trained, _), weights in sorted(kinds.items()):
            dtypes, devices, counts = zip(*weights, strict=True)
            label = f"{name} (LoRA)" if trained else name
            rows.append(PartRow(label, "+".join(sorted(set(dtypes))), "+".join(sorted(set(devices))), sum(counts)))
    return rows


def _weights(module: nn.Module) -> Iterator[tuple[tuple[bool, bool], tuple[str, str, int]]]:
    """((trained, packed), (dtype, device, count)) of every tensor; streamed ones come to their device from RAM."""
    seen: set[int] = set()
    layer: Any
    for layer in module.modules():
        via = "RAM → " if hasattr(layer, "home") else ""
        if hasattr(layer, "packing"):
            place = next(layer.buffers(recurse=False)).device
            yield (False, True), (layer.packing.title, f"{via}{place}", layer.weight_shape.numel())
        for p in layer._parameters.values():
            if p is not None and id(p) not in seen:
                seen.add(id(p))
                dtype = NAMES.get(p.dtype, str(p.dtype).removeprefix("torch."))
                yield (p.requires_grad, False), (dtype, f"{'' if p.requires_grad else via}{p.device}", p.numel())


def assert_trainable_float32(model: nn.Module) -> None:
    """Small updates vanish in 16 bits, and the loss scaler refuses fp16 gradients."""
    wrong = [name for name, p in model.named_parameters() if p.requires_grad and p.dtype != torch.float32]
    assert not wrong, f"trainable weights not in float32: {wrong[:3]} ({len(wrong)} in all)"
