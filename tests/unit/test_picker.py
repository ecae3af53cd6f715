"""The choice of device, budget and preset for cards that are not here; allowances, cap and warnings (F03, F07)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_trainer.config import presets
from lora_trainer.config.loading import load
from lora_trainer.config.schema import MemoryConfig
from lora_trainer.errors import MachineError, set_language
from lora_trainer.machine import allowance
from lora_trainer.machine.allowance import Allowance, allowance_for, base_allowance, memory_file, remember
from lora_trainer.machine.cap import SpillWatchdog, cap_process, spill_warning
from lora_trainer.machine.card import Card, Holder, largest_first
from lora_trainer.machine.hardware import Machine
from lora_trainer.machine.ram import Ram, ram_budget, ram_notice
from lora_trainer.planner.picker import Choice, fitting_preset, pick, preset_budget, settle
from lora_trainer.units import GIB


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))


def gib(count: float) -> int:
    return int(count * GIB)


IDLE_8 = Card("NVIDIA GeForce RTX 3070", (8, 6), gib(8), gib(7.45))
BROWSER_8 = replace(
    IDLE_8, free=gib(6.2), display=True, holders=(Holder("navegador.exe", gib(0.9)), Holder("dwm.exe", None))
)
CARD_4 = Card("NVIDIA GeForce GTX 1650", (7, 5), gib(4), gib(3.6))
CARD_24 = Card("NVIDIA GeForce RTX 4090", (8, 9), gib(24), gib(23.2), index=1)
WITHOUT_CUDA = Machine(cuda_build=None, torch_version="2.13.0+cpu")


def on_linux(card: Card | None) -> Allowance:
    return base_allowance(card, "Linux")


def machine(*cards: Card, system: str = "Linux", wsl: bool = False) -> Machine:
    return Machine(cuda_build="12.8", cards=cards, system=system, driver="570.1", wsl=wsl)


def choose(*cards: Card, device: str = "auto", system: str = "Linux", wsl: bool = False, **memory: object) -> Choice:
    settings = MemoryConfig.model_validate(memory)
    return pick(settings, device, machine(*cards, system=system, wsl=wsl), allowance_of=on_linux)


# -- presets by free memory


@pytest.mark.parametrize(
    ("card", "system", "preset"),
    [
        (IDLE_8, "Linux", "8gb"),
        (replace(IDLE_8, free=gib(7.1)), "Windows", "8gb"),  # an idle Windows desktop
        (BROWSER_8, "Windows", "6gb"),
        (BROWSER_8, "Linux", "6gb"),
        (replace(IDLE_8, free=gib(0.5)), "Linux", "4gb"),
        (CARD_4, "Linux", "4gb"),
        (CARD_24, "Linux", "24gb"),
        (replace(CARD_24, free=gib(11)), "Linux", "12gb"),
        (Card("NVIDIA A100 MIG 1g.10gb", (8, 0), gib(9.75), gib(9.3)), "Linux", "8gb"),
        (Card("NVIDIA H200", (9, 0), gib(139), gib(138)), "Linux", "24gb"),
    ],
)
def test_the_preset_follows_free_memory(card: Card, system: str, preset: str) -> None:
    choice = choose(card, system=system)
    assert choice.preset == preset
    assert choice.card == card
    assert choice.device == torch.device("cuda", card.index)
    assert card.name in choice.line()
    assert preset in choice.line()


def test_the_line_names_numbers_and_who_holds_the_card() -> None:
    line = choose(BROWSER_8).line()
    for part in ("preset 6gb", "6.20 GiB livres de 8.00 GiB", "navegador.exe 0.90 GiB", "dwm.exe"):
        assert part in line
    assert "\n" not in line
    many = replace(BROWSER_8, holders=tuple(Holder(f"p{i}", i) for i in range(5)))
    assert "e mais 2" in choose(many).line()
    assert "em uso por" not in choose(IDLE_8).line()  # NVML did not answer
    assert "em uso por" not in choose(replace(IDLE_8, holders=())).line()
    set_language("en")
    assert "6.20 GiB free of 8.00 GiB (in use by" in choose(BROWSER_8).line()


def test_holders_come_largest_first() -> None:
    assert [h.name for h in largest_first([Holder("a", None), Holder("b", 1), Holder("c", 2)])] == ["c", "b", "a"]


def test_the_emptiest_of_two_cards() -> None:
    choice = choose(replace(IDLE_8, index=0), CARD_24)
    assert (choice.device, choice.preset) == (torch.device("cuda", 1), "24gb")
    assert "a mais livre de 2 placas" in choice.line()
    asked = choose(replace(IDLE_8, index=0), CARD_24, device="cuda:0")
    assert (asked.device, asked.preset) == (torch.device("cuda", 0), "8gb")
    assert "a mais livre" not in asked.line()


def test_a_desktop_keeps_its_share() -> None:
    """Windows, WSL and a card with a display: what the desktop takes later would spill."""
    linux = choose(IDLE_8).budget
    assert linux is not None
    for other in (
        choose(replace(IDLE_8, display=True)),
        choose(IDLE_8, wsl=True),
        choose(IDLE_8, system="Windows"),
    ):
        assert other.budget == linux - GIB // 4


def test_the_own_context_is_not_counted_twice() -> None:
    """PyTorch's free memory comes after our context was made, NVML's before."""
    after = choose(IDLE_8)
    before = choose(replace(IDLE_8, free=IDLE_8.free + after.allowance.context, context_made=False))
    assert before.budget == after.budget == IDLE_8.free + after.allowance.context


# -- --vram


def test_vram_imitates_a_smaller_card() -> None:
    choice = choose(CARD_24, vram=6)
    assert (choice.budget, choice.preset) == (gib(6), "6gb")
    assert choice.cap == gib(6) - choice.allowance.context
    assert choice.available is not None
    assert choice.allowance.total(choice.available) == pytest.approx(gib(6), abs=4)
    assert "limitado a 6.00 GiB por memoria.vram" in choice.line()
    assert choice.notices == ()


def test_vram_beyond_what_is_free_is_told() -> None:
    choice = choose(BROWSER_8, vram=8)
    assert choice.budget is not None
    assert choice.budget < gib(6.5)
    (notice,) = choice.notices
    assert "memoria.vram pede 8.00 GiB" in notice


@pytest.mark.parametrize(("vram", "preset"), [(2, "4gb"), (3, "4gb"), (4, "4gb"), (6, "6gb"), (8, "8gb"), (24, "24gb")])
def test_vram_on_the_cpu(vram: float, preset: str) -> None:
    choice = pick(MemoryConfig(vram=vram), "cpu", WITHOUT_CUDA)
    assert (choice.device.type, choice.preset, choice.card) == ("cpu", preset, None)
    assert choice.budget == gib(vram)
    assert f"como se houvesse uma placa de {vram:g} GiB" in choice.line()
    assert ("vai tentar caber" in " ".join(choice.notices)) == (vram < 3.36)


# -- no card, words, resume


def test_f02_no_card_trains_on_the_cpu_without_a_preset() -> None:
    choice = pick(MemoryConfig(), "auto", WITHOUT_CUDA)
    assert (choice.device.type, choice.preset, choice.budget, choice.available, choice.cap) == (
        "cpu", None, None, None, None,
    )  # fmt: skip
    assert "sem suporte a CUDA" in choice.notices[0]
    hidden = pick(MemoryConfig(), "auto", Machine(cuda_build="12.8", driver="470.1"))
    assert "não vê nenhuma placa" in hidden.notices[0]
    with pytest.raises(MachineError):
        pick(MemoryConfig(), "cuda", WITHOUT_CUDA)


def test_a_preset_by_name_and_none() -> None:
    asked = choose(CARD_4, preset="12gb")
    assert asked.preset == "12gb"
    assert "o plano vai tentar caber" in asked.notices[0]
    assert choose(CARD_24, preset="4gb").notices == ()
    assert choose(CARD_24, preset="none").preset is None
    assert "como pedido" in choose(CARD_24, preset="none").line()


def test_a_resumed_run_keeps_its_preset() -> None:
    choice = pick(MemoryConfig(), "auto", machine(CARD_24), earlier="6gb", allowance_of=on_linux)
    assert choice.preset == "6gb"
    assert "execução retomada" in choice.line()


def test_settle_lays_the_preset_under_the_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = "modelo: {modelo_base: a/b, familia: sdxl}\ndados: {diretorio_dados: .}\ntreino: {tamanho_lote: 2}\n"
    path.write_text(text, encoding="utf-8")
    loaded, choice = settle(load(path, ["memoria.vram=4"]), machine(CARD_24))
    assert (loaded.preset, choice.preset) == ("4gb", "4gb")
    assert loaded.config.data.resolution == (1024, 1024)
    assert loaded.config.training.batch_size == 2
    assert loaded.config.memory.vram == 4
    loaded, choice = settle(load(path), WITHOUT_CUDA)
    assert (loaded.preset, choice.preset, loaded.config.data.resolution) == (None, None, (512, 512))
    loaded, _ = settle(load(path, ["memoria.preset=none"]), machine(CARD_24))
    assert loaded.preset is None
    loaded, choice = settle(load(path, ["memoria.preset=6gb"]), machine(CARD_24))
    assert (loaded.preset, choice.preset) == ("6gb", "6gb")


def test_every_preset_fits_its_own_nominal_card() -> None:
    for name in presets.names():
        assert fitting_preset(presets.size_gib(name) * GIB) == name
        assert fitting_preset(preset_budget(name)) == name
        assert fitting_preset(preset_budget(name) - 1) != name or name == "4gb"


# -- allowance


@pytest.mark.parametrize("card", [None, CARD_4, IDLE_8, CARD_24, Card("GTX 1080", (6, 1)), Card("H200", (9, 0))])
def test_for_tensors_inverts_total(card: Card | None) -> None:
    base = base_allowance(card)
    for budget in (gib(2), gib(6), gib(24)):
        tensors = base.for_tensors(budget)
        assert budget - 4 <= base.total(tensors) <= budget
        assert base.reserved(tensors) == base.total(tensors) - base.context
    assert base.for_tensors(gib(0.3)) == 0
    assert gib(0.3) < base.total(0) < gib(1)


def test_windows_costs_more() -> None:
    assert base_allowance(IDLE_8, "Windows").context > base_allowance(IDLE_8, "Linux").context


def test_a_measured_run_corrects_the_next_one() -> None:
    base = base_allowance(IDLE_8)
    assert allowance_for(IDLE_8) == base
    predicted = base.reserved(gib(4))
    remember(IDLE_8, predicted, predicted + gib(0.3))
    remember(IDLE_8, predicted, predicted + gib(0.1))
    assert allowance_for(IDLE_8).correction == gib(0.3)  # the worst on record
    assert allowance_for(IDLE_8).for_tensors(gib(6)) < base.for_tensors(gib(6))
    assert allowance_for(CARD_4) == base_allowance(CARD_4)
    for _ in range(allowance.KEPT):
        remember(IDLE_8, predicted, predicted - gib(2))
    assert allowance_for(IDLE_8).correction == -base.workspaces  # never below what the tensors themselves need
    ((key, values),) = json.loads(memory_file().read_text(encoding="utf-8")).items()
    assert key == f"{IDLE_8.name} | torch {torch.__version__}"
    assert len(values) == allowance.KEPT
    assert [p.name for p in memory_file().parent.iterdir()] == [memory_file().name]


@pytest.mark.parametrize("content", ["{", "[]", '{"x": 1}', '{"x": ["a", null, true]}', ""])
def test_a_damaged_memory_counts_as_empty(content: str) -> None:
    memory_file().parent.mkdir(parents=True)
    memory_file().write_text(content.replace("x", f"{IDLE_8.name} | torch {torch.__version__}"), encoding="utf-8")
    assert allowance_for(IDLE_8) == base_allowance(IDLE_8)
    remember(IDLE_8, 0, 5)
    assert allowance_for(IDLE_8).correction == 5


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arquivo").touch()
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "arquivo" / "cache"))
    remember(IDLE_8, 0, 5)
    assert allowance_for(IDLE_8).correction == 0


def test_the_correction_never_makes_the_allowance_negative() -> None:
    assert Allowance(0, 100, 0.0, correction=-100).reserved(0) == 0


# -- cap and spill (F03)


def test_the_cpu_is_not_capped() -> None:
    assert cap_process(torch.device("cpu"), gib(1)) is None


def test_f03_pre_flight_warning_has_both_numbers_and_the_setting() -> None:
    card = replace(IDLE_8, free=gib(7.1))
    text = spill_warning(gib(8.6), card, spills=True)
    assert text is not None
    for part in (
        "8.60 GiB",
        "7.10 GiB",
        "8.00 GiB",
        "CUDA - Sysmem Fallback Policy",
        "Prefer No Sysmem Fallback",
        "--vram",
    ):
        assert part in text
    assert spill_warning(gib(7), card, spills=True) is None
    assert spill_warning(gib(8.6), card, spills=False) is None
    assert machine(system="Windows").spills
    assert machine(wsl=True).spills
    assert not machine().spills


def test_f03_the_watchdog_speaks_once() -> None:
    dog = SpillWatchdog(expected_seconds=1.0)
    said = [dog.step(20.0, gib(7.8), gib(8)) for _ in range(20)]
    assert [text is not None for text in said].index(True) < 5
    assert sum(text is not None for text in said) == 1
    assert "20 vezes" in "".join(filter(None, said))
    assert "7.80 GiB de 8.00 GiB" in "".join(filter(None, said))


def test_f03_the_watchdog_finds_its_own_measure() -> None:
    dog = SpillWatchdog()
    steps = [9.0, 1.0, 1.1, 1.0, 8.0, 1.0, 8.0, 8.0]  # a slow first step and a hiccup say nothing
    assert [dog.step(seconds, gib(7.8), gib(8)) for seconds in steps] == [None] * len(steps)
    assert dog.step(8.0, gib(7.8), gib(8)) is not None


def test_f03_slow_without_a_full_card_is_something_else() -> None:
    dog = SpillWatchdog(expected_seconds=1.0)
    assert [dog.step(20.0, gib(7), gib(8)) for _ in range(9)] == [None] * 9
    assert [dog.step(4.9, gib(8), gib(8)) for _ in range(9)] == [None] * 9


# -- RAM (F07)


def test_f07_ram_notice_has_numbers() -> None:
    small = Ram(gib(16), gib(12), gib(4))
    assert ram_notice(gib(11), small) is None
    swapping, dying = ram_notice(gib(14), small), ram_notice(gib(24), small)
    assert swapping is not None
    assert dying is not None
    for part in ("24.00 GiB", "12.00 GiB", "16.00 GiB", "4.00 GiB", "memoria.mestre_em_disco", "encerrar"):
        assert part in dying
    assert "devagar" in swapping
    assert "encerrar" not in swapping


def test_f07_ram_budget_leaves_a_reserve() -> None:
    assert ram_budget(MemoryConfig(), Ram(gib(16), gib(12))) == pytest.approx(gib(12) - gib(1.6), abs=2)
    assert ram_budget(MemoryConfig(), Ram(gib(4), gib(3))) == gib(2)
    assert ram_budget(MemoryConfig(), Ram(gib(4), gib(0.5))) == 0
    assert ram_budget(MemoryConfig(ram=3), Ram(gib(4), gib(0.5))) == gib(3)
    assert Ram.read().total > 0
