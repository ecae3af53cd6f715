"""From free memory to a device, a budget and a preset, with the reason in one line.

Everything is decided from a `Machine` record, so each rule can be tried for cards that are not here. A preset is taken
when its card's share of memory is really free: another program's use counts, not the number on the box.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import presets
from ..config.loading import Loaded
from ..config.schema import MemoryConfig
from ..errors import t
from ..machine.allowance import Allowance, allowance_for
from ..machine.card import Card
from ..machine.hardware import Machine, choose_device
from ..units import GIB, gib

USABLE_SHARE = 0.84
"""Of a card's nominal size, what its preset must fit in: an idle 8 GB card with a display and Windows has 7 GiB left."""
DISPLAY_RESERVE = GIB // 4
"""A desktop's use grows while a run lasts; what it pushes out would spill."""


@dataclass(frozen=True)
class Choice:
    """What a run may use. Memory in bytes; `budget` and `available` are None on a CPU that imitates no card."""

    device: torch.device
    card: Card | None
    preset: str | None
    budget: int | None
    """For the whole process, CUDA context included."""
    allowance: Allowance
    reason: str
    notices: tuple[str, ...] = ()
    spills: bool = False
    """The driver would move what does not fit into shared memory."""

    @property
    def available(self) -> int | None:
        """For live tensors."""
        return None if self.budget is None else self.allowance.for_tensors(self.budget)

    @property
    def cap(self) -> int | None:
        """For PyTorch's allocator, which does not see the context."""
        return None if self.budget is None else max(0, self.budget - self.allowance.context)

    def line(self) -> str:
        preset = f"preset {self.preset}" if self.preset else t(pt="sem preset", en="no preset")
        return f"{preset}: {self.reason}"


def settle(loaded: Loaded, machine: Machine | None = None, *, earlier: str | None = None) -> tuple[Loaded, Choice]:
    """The choice, and the config laid over its preset. `earlier`: the preset of the run that is being resumed."""
    choice = pick(loaded.config.memory, loaded.config.system.device, machine or Machine.read(), earlier=earlier)
    if loaded.preset is None and choice.preset:
        loaded = loaded.with_preset(choice.preset)
    return loaded, choice


def pick(
    memory: MemoryConfig,
    device_setting: str,
    machine: Machine,
    *,
    earlier: str | None = None,
    allowance_of: Callable[[Card | None], Allowance] | None = None,
) -> Choice:
    """Raises MachineError as `choose_device` does."""
    device, notices = choose_device(device_setting, machine)
    card = next((card for card in machine.cards if device.type == "cuda" and card.index == device.index), None)
    allowance = allowance_of(card) if allowance_of else allowance_for(card, machine.system)
    wanted = None if memory.vram is None else int(memory.vram * GIB)
    if card is None:
        budget, reason = wanted, _cpu_reason(memory)
    else:
        budget, reason, more = _card_budget(card, machine, allowance, wanted)
        notices = [*notices, *more]
    preset, why = _preset(memory, budget, earlier)
    notices += _too_small(preset, budget)
    return Choice(device, card, preset, budget, allowance, f"{reason}{why}", tuple(notices), machine.spills)


def fitting_preset(budget: int) -> str:
    """The preset of the largest card whose share is there; the smallest one where none is."""
    fitting = [name for name in presets.names() if preset_budget(name) <= budget]
    return fitting[-1] if fitting else presets.names()[0]


def preset_budget(name: str) -> int:
    """Bytes, context included, within which a preset must train."""
    return int(presets.size_gib(name) * GIB * USABLE_SHARE)


def usable(card: Card, allowance: Allowance) -> int:
    """What this process may take of the card, its context included, without pushing anybody out."""
    return card.free + (allowance.context if card.context_made else 0)


def _card_budget(card: Card, machine: Machine, allowance: Allowance, wanted: int | None) -> tuple[int, str, list[str]]:
    there = usable(card, allowance)
    if card.display or machine.spills:
        there -= DISPLAY_RESERVE
    reason = t(
        pt=f"{card.name} (cuda:{card.index}) tem {gib(card.free)} livres de {gib(card.total)}",
        en=f"{card.name} (cuda:{card.index}) has {gib(card.free)} free of {gib(card.total)}",
    )
    if others := _others(card):
        reason += f" ({others})"
    if len(machine.cards) > 1 and card.free == max(other.free for other in machine.cards):
        count = len(machine.cards)
        reason += t(pt=f", a mais livre de {count} placas", en=f", the emptiest of {count} cards")
    if wanted is None:
        return there, reason, []
    if wanted <= there:
        limit = t(pt=f"; limitado a {gib(wanted)} por memoria.vram", en=f"; limited to {gib(wanted)} by memory.vram")
        return wanted, reason + limit, []
    notice = t(
        pt=f"memoria.vram pede {gib(wanted)}, mas só {gib(there)} da placa podem ser usados; vale o menor",
        en=f"memory.vram asks for {gib(wanted)}, but only {gib(there)} of the card can be used; the smaller counts",
    )
    return there, reason, [notice]


def _others(card: Card) -> str:
    """The programs that hold the card, largest first, where the system names them."""
    if not card.holders:
        return ""
    shown = [str(holder) for holder in card.holders[:3]]
    more = len(card.holders) - len(shown)
    tail = t(pt=f" e mais {more}", en=f" and {more} more") if more else ""
    return t(pt="em uso por ", en="in use by ") + ", ".join(shown) + tail


def _cpu_reason(memory: MemoryConfig) -> str:
    if memory.vram is None:
        return t(pt="treino na CPU", en="training on the CPU")
    return t(
        pt=f"na CPU, como se houvesse uma placa de {memory.vram:g} GiB",
        en=f"on the CPU, as if there were a card of {memory.vram:g} GiB",
    )


def _preset(memory: MemoryConfig, budget: int | None, earlier: str | None) -> tuple[str | None, str]:
    if memory.preset == "none":
        return None, t(pt="; nenhum preset, como pedido", en="; no preset, as asked")
    if memory.preset != "auto":
        return memory.preset, t(pt="; o preset foi pedido", en="; the preset was asked for")
    if earlier:
        return earlier, t(pt="; o preset é o da execução retomada", en="; the preset is the resumed run's")
    return (None if budget is None else fitting_preset(budget)), ""


def _too_small(preset: str | None, budget: int | None) -> list[str]:
    if preset is None or budget is None or preset_budget(preset) <= budget:
        return []
    have, size = gib(budget), presets.size_gib(preset)
    return [
        t(
            pt=f"o preset {preset} é feito para {gib(preset_budget(preset))} livres numa placa de {size} GB e há {have}; "
            "o plano vai tentar caber",
            en=f"preset {preset} is made for {gib(preset_budget(preset))} free on a card of {size} GB and there are "
            f"{have}; the plan will try to fit",
        )
    ]
