"""E01, E05, F02: device and precision are decided from plain facts about the machine, and told."""

import pytest
import torch
from torch import nn

from lora_trainer.engine.packed import RowScaled, pack_layers
from lora_trainer.errors import MachineError, set_language
from lora_trainer.machine.hardware import (
    Card,
    Machine,
    assert_trainable_float32,
    choose_device,
    choose_precision,
    describe_parts,
)
from lora_trainer.seam.family import BlockGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GTX_1080 = Card("NVIDIA GeForce GTX 1080", (6, 1))
GTX_1660 = Card("NVIDIA GeForce GTX 1660 SUPER", (7, 5))
GTX_1650 = Card("NVIDIA GeForce GTX 1650", (7, 5))
RTX_2060 = Card("NVIDIA GeForce RTX 2060", (7, 5))
RTX_3060 = Card("NVIDIA GeForce RTX 3060", (8, 6))
H200 = Card("NVIDIA H200", (9, 0))
MAXWELL = Card("NVIDIA GeForce GTX 970", (5, 2))


@pytest.fixture(autouse=True)
def portuguese():
    set_language("pt")
    yield
    set_language("auto")


@pytest.mark.parametrize(
    ("setting", "card", "name", "told"),
    [
        ("auto", GTX_1080, "fp16", False),
        ("auto", RTX_2060, "fp16", False),
        ("auto", GTX_1660, "fp32", True),
        ("auto", GTX_1650, "fp32", True),
        ("auto", MAXWELL, "fp32", True),
        ("auto", RTX_3060, "bf16", False),
        ("auto", H200, "bf16", False),
        ("bf16", GTX_1080, "fp16", True),
        ("bf16", RTX_2060, "fp16", True),
        ("bf16", GTX_1660, "fp32", True),
        ("bf16", RTX_3060, "bf16", False),
        ("fp16", RTX_2060, "fp16", False),
        ("fp16", RTX_3060, "fp16", False),
        ("fp16", GTX_1660, "fp32", True),
        ("no", RTX_3060, "fp32", False),
        ("no", GTX_1660, "fp32", False),
    ],
)
def test_e01_precision_by_capability_and_name(setting, card, name, told):
    precision = choose_precision(setting, CUDA, card)
    assert precision.name == name
    assert precision.frozen == precision.compute
    assert precision.scaler == (name == "fp16")
    assert len(precision.notices) == told
    if told:
        assert card.name in precision.notices[0]
        assert name in precision.notices[0]


def test_e01_torchs_own_boolean_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *a, **k: True)
    assert choose_precision("auto", CUDA, RTX_2060).name == "fp16"


def test_e01_refusal_names_key_card_and_capability():
    (notice,) = choose_precision("bf16", CUDA, RTX_2060).notices
    for part in ("precisao_mista", "RTX 2060", "7.5", "fp16"):
        assert part in notice


@pytest.mark.parametrize(
    ("setting", "name", "told"), [("auto", "fp32", 0), ("fp16", "fp32", 1), ("bf16", "bf16", 0), ("no", "fp32", 0)]
)
def test_e05_precision_on_the_cpu(setting, name, told):
    precision = choose_precision(setting, CPU)
    assert (precision.name, len(precision.notices), precision.scaler) == (name, told, False)


CPU_BUILD = {"cuda_build": None, "torch_version": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("system", "way_out"),
    [
        ("Linux", "pip install --no-cache-dir torch"),
        ("Windows", "pytorch.org/get-started"),
        ("Darwin", "dispositivo: cpu"),
    ],
)
def test_f02_cpu_only_build_shows_the_command_of_the_system(system, way_out):
    with pytest.raises(MachineError) as caught:
        choose_device("cuda", Machine(system=system, **CPU_BUILD))
    assert "2.13.0+cpu" in caught.value.problem
    assert "sem suporte a CUDA" in caught.value.problem
    assert way_out in caught.value.hint
    assert caught.value.exit_code == 2


def test_f02_cuda_build_without_a_card_shows_what_was_seen():
    with pytest.raises(MachineError) as caught:
        choose_device("cuda:0", Machine(cuda_build="12.8", driver="470.103.01"))
    assert "12.8" in caught.value.problem
    assert "470.103.01" in caught.value.problem
    assert "nvidia-smi" in caught.value.hint
    assert "sem suporte" not in caught.value.problem


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_f02_hidden_cards(hidden):
    with pytest.raises(MachineError) as caught:
        choose_device("cuda", Machine(cuda_build="12.8", driver="550.1", visible=hidden))
    assert f"CUDA_VISIBLE_DEVICES={hidden!r}" in caught.value.problem
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint


def test_f02_auto_without_a_card_runs_with_one_notice():
    device, notices = choose_device("auto", Machine(**CPU_BUILD))
    assert device == CPU
    assert len(notices) == 1
    assert "lento" in notices[0]


def test_cpu_asked_is_cpu_without_a_word():
    assert choose_device("cpu", Machine(cuda_build="12.8", cards=(RTX_3060,))) == (CPU, [])


def test_cards_by_number():
    machine = Machine(cuda_build="12.8", cards=(RTX_3060, RTX_2060))
    assert choose_device("auto", machine) == (CUDA, [])
    assert choose_device("cuda:1", machine)[0] == torch.device("cuda", 1)
    with pytest.raises(MachineError) as caught:
        choose_device("cuda:2", machine)
    assert "cuda:1 (NVIDIA GeForce RTX 2060)" in caught.value.hint


def test_messages_in_english():
    set_language("en")
    with pytest.raises(MachineError, match="without CUDA support"):
        choose_device("cuda", Machine(**CPU_BUILD))
    assert "needs a card of compute capability 8.0" in choose_precision("bf16", CUDA, RTX_2060).notices[0]


def test_reading_this_machine_works_without_a_card():
    machine = Machine.read()
    assert machine.torch_version == torch.__version__
    assert choose_device("cpu", machine)[0] == CPU


def _adapted() -> nn.ModuleDict:
    part = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    part[0].requires_grad_(False).half()
    return nn.ModuleDict({"unet": part})


def test_e05_table_comes_from_the_live_modules():
    rows = describe_parts({**_adapted(), "vae": nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False)})
    assert [(row.component, row.dtype, row.device, row.parameters) for row in rows] == [
        ("unet", "fp16", "cpu", 12),
        ("unet (LoRA)", "fp32", "cpu", 6),
        ("vae", "bf16", "cpu", 6),
    ]


def test_e03_trainable_weights_in_16_bits_are_a_bug():
    model = _adapted()
    assert_trainable_float32(model)
    model["unet"][1].half()
    with pytest.raises(AssertionError, match=r"unet\.1\.weight"):
        assert_trainable_float32(model)


def test_e05_packed_and_streamed_weights_are_told_as_they_are():
    """A quantised base has hardly any parameters left: its weights are told by the format that they are kept in."""
    model = nn.ModuleDict({"unet": nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))}).to("meta").requires_grad_(False)
    pack_layers([BlockGroup("", [model["unet"]])], RowScaled(torch.int8, (nn.Linear,)))
    model["unet"][1] = nn.Linear(8, 8).half().requires_grad_(False)
    model["unet"][1].home = CPU
    for layer in model["unet"][:1]:
        layer.pack_weight(torch.randn(8, 64), CPU)
        layer.bias = nn.Parameter(torch.zeros(8), requires_grad=False)
    rows = [(row.component, row.dtype, row.device, row.parameters) for row in describe_parts(model)]
    assert rows == [("unet", "fp16+fp32", "RAM → cpu+cpu", 8 + 72), ("unet", "int8", "cpu", 512)]
