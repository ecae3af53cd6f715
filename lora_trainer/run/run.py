"""The order of phases, from a checked config to a verified adapter file. Only this module knows it.

config → device and precision → optimizer probe → base opened (headers) → images checked → captions and images encoded →
model, adapter, techniques → loop with saves, validation and previews → file verified by the consumer's loader.
"""

import logging
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch

from .. import adapters
from ..adapters import training_lora
from ..atomic import write_json
from ..config import effective
from ..config.declared import with_values
from ..config.loading import Loaded
from ..config.schema import Config
from ..engine.tracker import MemoryTracker
from ..errors import Interrupted, UserError, t
from ..families import resolve
from ..journal.checkpoint import latest_step, newest_facts
from ..journal.interrupt import StopRequest
from ..journal.plot import plot_metrics
from ..journal.progress import Metrics, Phases, Terminal, peak_resident_bytes
from ..journal.run_folder import Lock, RunFolder, check, claim
from ..machine import hardware
from ..machine.cap import cap_process, spill_warning
from ..machine.ram import Ram, ram_notice
from ..modality import Desk, Modality, RunFacts
from ..optim import optimizers, schedules
from ..planner.caching import rung_title
from ..planner.picker import Choice, settle
from ..seam.family import Family
from ..units import gib
from .planning import Planning
from .resume import changes, resume_options
from .setup import Setup, Target
from .training import Session, Training


def train(loaded: Loaded, stop: StopRequest, *, resume: bool = False, restart: bool = False) -> None:
    """Train as the config says. Raises UserError subclasses or Interrupted, whose `exit_code` the command returns."""
    folder = RunFolder(loaded.run_dir, loaded.name)
    with Lock(folder):
        check(folder, resume=resume, restart=restart)
        terminal, metrics = Terminal(), Metrics()
        handler = terminal.log_handler()
        logging.getLogger("lora_trainer").addHandler(handler)
        try:
            earlier = folder.read_facts().get("preset") if resume else None
            loaded, choice = settle(loaded, earlier=earlier)
            Run(loaded, choice, folder, terminal, metrics, stop).go(resume=resume)
        except (UserError, Interrupted) as error:
            metrics.event("stopped", reason=type(error).__name__, problem=error.problem)
            terminal.note(str(error))
            raise
        finally:
            logging.getLogger("lora_trainer").removeHandler(handler)
            metrics.close()
            terminal.close()


@dataclass
class Run:
    """One run. Every method is one phase; attributes appear in the order of `go`."""

    loaded: Loaded
    choice: Choice
    folder: RunFolder
    terminal: Terminal
    metrics: Metrics
    stop: StopRequest

    @property
    def config(self) -> Config:
        """With what is settled so far."""
        return self.loaded.config

    def go(self, *, resume: bool) -> None:
        self.choose_machine()
        self.open_base()
        self.read_data()
        self.stop.check()
        self.settle_plan(resume)
        if resume:
            self.refuse_other_options()
        self.claim_folder(resume)
        self.remember_facts()
        if resume and self.already_done():
            return
        with self.within_limit():
            self.work(resume)

    def work(self, resume: bool) -> None:
        with self.phases.phase("cache"):
            self.prepare()
        self.stop.check()
        with self.phases.phase("load"):
            training = self.load_model()
        start = training.restore() if resume else 0
        self.stop.check()
        self.modality.previews.measure_before(training.setup.model, training.setup.adapter)
        self.folder.done.unlink(missing_ok=True)  # a finished run that is being extended is not finished
        with self.phases.phase("train"), self.stop.waiting_for_step():
            training.loop(start)
        self.finish(training)

    # -- before anything large is loaded

    def choose_machine(self) -> None:
        self.terminal.warn(*self.loaded.notices)
        if self.config.system.threads:
            torch.set_num_threads(self.config.system.threads)
        self.device = self.choice.device
        self.terminal.phase(self.choice.line())
        if self.choice.cap is not None:
            cap_process(self.device, self.choice.cap)
        self.precision = hardware.choose_precision(self.config.training.mixed_precision, self.device)
        about_optimizer = optimizers.optimizer_notices(self.config.training, self.device)
        self.terminal.warn(*self.choice.notices, *self.precision.notices, *about_optimizer)
        self.tracker = None
        if self.device.type == "cpu" and self.choice.available is not None:
            self.tracker = MemoryTracker(limit=self.choice.available, record=False)
        self.phases = Phases(self.device, self.tracker)
        quiet_libraries()
        optimizers.probe(self.config.training, self.device)

    def open_base(self) -> None:
        self.family = resolve(self.config.model, self.config.data)
        self.family.configure(self.config.training, self.config.data)
        self.terminal.phase(f"base: {self.family.title} · {self.family.source.title()}")
        self.terminal.warn(*self.family.notices)
        formats = self.family.chosen_formats(self.config.output.formats)
        self.terminal.warn(*adapters.check_targets(self.family, self.config.model, formats))
        self.terminal.say(*training_lora.check(self.family, self.config.model))

    def read_data(self) -> None:
        cache_dir = Path(self.config.data.cache_dir or Path(self.config.output.dir) / ".cache")
        self.modality = modality_of(self.family, self.config, cache_dir)
        with self.terminal.steps() as progress:
            warnings, notes = self.modality.read(progress)
        self.terminal.warn(*warnings)
        self.terminal.say(*notes)

    def settle_plan(self, resume: bool) -> None:
        self.planning = Planning(self.loaded, self.choice, self.precision, self.folder, self.terminal, self.metrics)
        worst = self.modality.batches(self.config.training, seed=0).worst_size()
        self.loaded = self.planning.settle(self.family.source, worst, resume=resume)
        self.terminal.warn(*self._shortages())

    def _shortages(self) -> list[str]:
        """RAM that will not suffice, and a card whose driver would hide that it is full."""
        found = self.planning.found
        needed = found.host if found is not None else 0
        if self.device.type == "cpu":
            needed += self.family.num_bytes(self.precision.frozen)
        warnings = [ram_notice(needed, Ram.read())]
        if self.choice.card is not None and found is not None:
            total = self.choice.allowance.total(found.peak)
            warnings.append(spill_warning(total, self.choice.card, self.choice.spills))
        return [warning for warning in warnings if warning]

    def within_limit(self) -> AbstractContextManager[object]:
        """A card is capped by its allocator; on the CPU, a tracker keeps an imitated card's limit."""
        return self.tracker or nullcontext()

    def refuse_other_options(self) -> None:
        """A state that cannot be gone on from is told before anything is encoded or loaded."""
        if (facts := newest_facts(self.folder.state)) is not None:
            changes(facts["options"], resume_options(self.config, facts["options"].get("system.seed", 0)))

    def claim_folder(self, resume: bool) -> None:
        """Only now: a start that fails on its base or data leaves an earlier run where it was."""
        note = claim(self.folder, resume=resume)
        self.terminal.open_log(self.folder.path / "registro.log")
        self.metrics.open(self.folder.metrics)
        if note:
            self.terminal.say(note)

    def remember_facts(self) -> None:
        """What a first start draws, a resumed one reads: the seed and the day."""
        facts = self.folder.read_facts()
        seed = self.config.system.seed
        drawn = facts.get("seed", random.SystemRandom().randrange(2**31)) if seed is None else seed
        self.seed, self.day = int(drawn), str(facts.get("day", date.today().isoformat()))
        write_json(self.folder.facts, {"seed": self.seed, "day": self.day, "preset": self.loaded.preset})
        if seed is None:
            seeded = with_values(self.config, {("system", "seed"): self.seed})
            origins = {**self.loaded.origins, "sistema.semente": t(pt="sorteada", en="drawn")}
            self.loaded = replace(self.loaded, config=seeded, origins=origins)
            self.terminal.say(t(pt=f"semente sorteada: {self.seed}", en=f"seed drawn: {self.seed}"))
        effective.write(self.loaded, self.folder.path / "config.yaml")
        training = self.config.training
        self.batches = self.modality.batches(training, self.seed)
        planned = training.epochs * self.batches.steps_per_epoch
        self.total = min(planned, training.max_steps or planned)

    def already_done(self) -> bool:
        step = latest_step(self.folder.state)
        if step < self.total or not self.folder.finished:
            return False
        done = f"{step}/{self.total}"
        self.terminal.say(
            t(
                pt=f"já terminou ({done}); aumente treino.epocas para continuar",
                en=f"already done ({done}); raise training.epochs to go on",
            )
        )
        return True

    # -- caching phase

    def prepare(self) -> None:
        self.terminal.say(*(f"  {line}" for line in self.modality.summary(self.batches, self.config.training.epochs)))
        self.terminal.warn(*schedules.schedule_notices(self.total, self.config.training))
        desk = Desk(
            self.config, self.device, self.precision, self.terminal, self.metrics, self.seed,
            self.planning.encoding, self._heard,
        )  # fmt: skip
        encoding, line = self.modality.prepare(desk)
        self.planning.write(encoding=encoding.to_json())
        self.terminal.phase(line)

    def _heard(self, phase: str, rung: str) -> None:
        """Memory ran out outside of training, and went down a ladder."""
        self.metrics.event("oom", phase=phase, rung=rung)
        self.terminal.warn(rung_title(phase, rung))

    # -- training

    def load_model(self) -> Training:
        target = Target(
            self.family, self.config, self.device, self.precision, self.seed,
            with_text=self.modality.trains_with_text, folder=self.folder.state, tell=self.terminal.warn,
        )  # fmt: skip
        session = Session(
            self.loaded, self.folder, self.terminal, self.metrics, self.stop, self.phases, self.planning
        )
        modality = self.modality
        setup = Setup(target, self.planning.rung)
        training = Training(session, setup, self.batches, modality.loader, modality.previews, self.total)
        training.build()
        self.planning.write(device=str(self.device), precision=self.precision.name, techniques=setup.techniques())
        parts = [*modality.parts, *hardware.describe_parts(setup.model)]
        rows = [[row.component, row.dtype, row.device, f"{row.parameters:,}"] for row in parts]
        title = t(pt="componente / precisão / dispositivo", en="component / dtype / device")
        self.terminal.table(title, ["", "", "", t(pt="parâmetros", en="parameters")], rows)
        facts = RunFacts(self.loaded, self.folder, self.day, self.total, self.terminal.warn)
        training.outputs = modality.outputs(facts, self.batches)
        return training

    def finish(self, training: Training) -> None:
        with self.phases.phase("preview"):
            training.last_preview()
        with self.phases.phase("save"):
            lines = training.finish()
        self.planning.write(
            techniques=training.setup.techniques(), peak_bytes=self.phases.peaks, peak_rss=peak_resident_bytes()
        )
        write_json(self.folder.done, {"steps": self.total})
        files = [path.name for path in training.outputs.written]
        self.metrics.event("done", step=self.total, files=files, peak_rss=peak_resident_bytes())
        self.plot()
        peak = gib(peak_resident_bytes())
        self.terminal.say(t(pt=f"pico de RAM do processo: {peak}", en=f"peak RAM of the process: {peak}"))
        self.terminal.say(*lines, style="green")

    def plot(self) -> None:
        """The run is done and verified; a plot that cannot be drawn does not change that."""
        try:
            plot_metrics(self.folder.metrics, self.folder.path / "perda.png")
        except (OSError, ValueError, RuntimeError) as error:
            self.terminal.warn(
                t(pt=f"o gráfico da perda não foi gravado: {error}", en=f"the loss plot was not written: {error}")
            )


def modality_of(family: Family, config: Config, cache_dir: Path) -> Modality:
    """Data, previews and files of a run that trains this family, which declares what it learns from."""
    if family.learns_from == "images":
        from ..data.modality import Images

        return Images(cast(Any, family), config, cache_dir)
    from ..text.modality import Texts

    return Texts(cast(Any, family), config)


def quiet_libraries() -> None:
    """Their bars would break ours, and their remarks are not about anything that the user can change."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()

