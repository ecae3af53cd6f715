"""The plan of one run: solved before anything is loaded, kept in its folder, tightened when memory runs out.

With a budget (a card, or --vram on the CPU) every phase is foreseen and the options at `auto` solved; without one, what the
config says holds. A resumed run goes on with the plan it had, unless there is less room now.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import names
from ..config.declared import with_values
from ..config.loading import Loaded
from ..errors import DoesNotFitError, language, t
from ..files.sources import Source
from ..journal.progress import Metrics, Terminal
from ..journal.run_folder import RunFolder
from ..machine.hardware import Precision
from ..planner.advice import does_not_fit, explain, phase_title
from ..planner.ask import ask, not_quantized
from ..planner.caching import Encoding
from ..planner.foresee import Foresight, named
from ..planner.ladder import BATCH_SIZE, Rung, plain_values, with_needs
from ..planner.picker import Choice
from ..runtime.kept import fixed_on_resume, read_plan, write_plan
from ..units import gib

TRAINING_PHASES = ("load", "forward", "backward", "optimizer")


@dataclass
class Planning:
    """`settle` first; `loaded` then holds the options in force."""

    loaded: Loaded
    choice: Choice
    precision: Precision
    folder: RunFolder
    terminal: Terminal
    metrics: Metrics
    found: Foresight | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What plano.json says besides the plan."""
    rung: Rung = field(init=False)
    encoding: Encoding = field(init=False)

    def settle(self, source: Source, worst: tuple[int, tuple[int, int]], *, resume: bool) -> Loaded:
        """The config with every option solved. `worst`: images and (width, height) of the largest micro-batch.

        Raises DoesNotFitError when what the user fixed cannot fit.
        """
        config = self.loaded.config
        kept = read_plan(self.folder.plan) if resume else None
        self.rung = Rung(plain_values(config), config.training.batch_size)
        if kept is not None:
            own = {key: self.rung.values[key] for key in self.loaded.settled if key in self.rung.values}
            micro_batch = min(kept.rung.micro_batch, config.training.batch_size)
            self.rung = Rung(with_needs({**kept.rung.values, **own}), micro_batch)
            self.facts = dict(kept.foreseen)
        if self.choice.available is not None and not (kept and kept.peak and kept.peak <= self.choice.available):
            self._foresee(source, worst, fixed_on_resume() if kept else frozenset())
        self.encoding = Encoding.from_json(self.found.encoding) if self.found else Encoding.of(config.memory, self.loaded.written)
        if kept and kept.encoding:
            self.encoding = self.encoding.resumed(Encoding.from_json(kept.encoding))
        solved = with_values(config, dict(self.rung.values))
        planned = set(self.rung.values) - self.loaded.settled if self.found or kept else set()
        origins = {names.options()[key].shown("pt"): t(pt="plano", en="plan") for key in planned}
        self.loaded = replace(self.loaded, config=solved, origins={**self.loaded.origins, **origins})
        return self.loaded

    @property
    def training_peak(self) -> int | None:
        """Bytes of live tensors while training."""
        if self.found is None:
            return None
        return max(self.found.phases[name].total for name in TRAINING_PHASES)

    def _foresee(self, source: Source, worst: tuple[int, tuple[int, int]], kept: frozenset[names.Key]) -> None:
        """`kept`: options that stay as they were when the run began."""
        config = with_values(self.loaded.config, {key: self.rung.values[key] for key in kept})
        self.terminal.phase(t(pt="planejando a memória", en="planning the memory"))
        self.found = found = ask(
            replace(self.loaded, config=config, written=self.loaded.written | kept),
            self.choice,
            source,
            self.precision.name,
            worst=worst,
        )
        if notice := not_quantized(config, found.values):
            self.terminal.warn(notice)
        if not found.fits:
            raise self._refused(found)
        split = found.micro_batch < worst[0]
        self.rung = Rung(found.values, found.micro_batch if split else config.training.batch_size)
        peak, available = gib(found.peak), gib(self.choice.available or 0)
        self.terminal.say(
            t(
                pt=f"  pico previsto {peak} de {available} em tensores, na fase {phase_title(found.worst_phase)}",
                en=f"  predicted peak {peak} of {available} of tensors, in phase {phase_title(found.worst_phase)}",
            )
        )

    def write(self, **facts: Any) -> None:
        """plano.json, with these facts besides those written before."""
        self.facts |= facts
        write_plan(self.folder.plan, self.rung, self.found, self.facts)

    # -- out of memory

    def tightened(self, rung: Rung | None, phase: str, problem: str) -> None:
        """Tell of a shortage and of the rung taken; None: there is none left, the same is tried again."""
        before, self.rung = self.rung, rung or self.rung
        action = _difference(before, self.rung) or t(pt="tentar de novo", en="try again")
        self.metrics.event(
            "oom", phase=phase, problem=problem, micro_batch=self.rung.micro_batch, plan=named(self.rung.values)
        )
        self.terminal.warn(
            t(
                pt=f"faltou memória em {phase_title(phase)}: {action}; nada se perdeu",
                en=f"out of memory in {phase_title(phase)}: {action}; nothing is lost",
            )
        )
        self.write()

    def failure(self, phase: str, problem: str) -> DoesNotFitError:
        """The last word: what was tried and what is left for the user to change."""
        lines = "\n    ".join(self._explained(phase, self.rung))
        return DoesNotFitError.said(
            pt=f"faltou memória em {phase_title(phase)}, mesmo com tudo o que o plano podia mudar ({problem})",
            en=f"out of memory in {phase_title(phase)}, even with all that the plan could change ({problem})",
            hint_pt=lines,
            hint_en=lines,
        )

    def _refused(self, found: Foresight) -> DoesNotFitError:
        lines = self._explained(found.worst_phase, Rung(found.values, found.micro_batch))
        return does_not_fit(found.peak, self.choice.available or 0, found.worst_phase, lines)

    def _explained(self, phase: str, rung: Rung) -> list[str]:
        """What fills the memory in a phase, as far as it was foreseen, and what would save some under this rung."""
        causes: Mapping[str, int] = {}
        if self.found is not None:
            causes = self.found.phases[phase if phase in self.found.phases else self.found.worst_phase].causes
        in_force = with_values(self.loaded.config, {**rung.values, BATCH_SIZE: rung.micro_batch})
        saving = frozenset(key for key, value in rung.values.items() if value not in ("no", None))
        return explain(phase, causes, in_force, saving, self.found.saves if self.found is not None else None)


def _difference(before: Rung, after: Rung) -> str:
    """What changed from one rung to the next, as the user would write it."""
    if after.micro_batch != before.micro_batch:
        count = after.micro_batch
        return t(pt=f"agora {count} exemplo(s) por vez", en=f"now {count} example(s) at a time")
    changed = {key: value for key, value in after.values.items() if before.values.get(key) != value}
    return ", ".join(
        f"{names.options()[key].shown()}={names.options()[key].word(value, language())}"
        for key, value in changed.items()
    )
