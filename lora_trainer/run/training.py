"""The training phase: steps, and what is due between two of them; tighter plans when memory runs out.

run/run.py knows what comes before and after; loop.py makes the steps; run/setup.py builds what is trained. Every step is a pure
function of the state before it, so after an out-of-memory the same step is done again.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..config.loading import Loaded
from ..config.names import Key
from ..errors import DivergedError, DoesNotFitError, Interrupted, MachineError, UserError, t
from ..journal.checkpoint import State, load_state, save_state
from ..journal.interrupt import StopRequest
from ..journal.progress import Metrics, Phases, Terminal
from ..journal.run_folder import RunFolder
from ..loop import StepReport, StepsInBackward, gradients, to_device
from ..loop import train as training_loop
from ..modality import Batches, Draw, Loader, Outputs, Previews
from ..optim import averages, schedules
from ..planner.ladder import MICRO_BATCH, Rung, next_rung, splits
from ..runtime.measured import Measured
from ..runtime.profile import Profiler
from ..runtime.recover import Shortage, attempt
from ..seam.family import Batch
from ..units import gib
from .planning import Planning
from .resume import changes, data_changed
from .setup import Setup

STATE_EVERY_SECONDS = 180.0
"""How often the state is saved when `saida.salvar_cada` does not say."""
RETRIES = 3
"""Below the last rung, at one place of the run: memory that another program took may come back."""


@dataclass(frozen=True)
class Session:
    """What every part of one run shares."""

    loaded: Loaded
    folder: RunFolder
    terminal: Terminal
    metrics: Metrics
    stop: StopRequest
    phases: Phases
    planning: Planning


class Training:
    """`build` first; then `restore` if the run resumes; then `loop` and `finish`. `outputs` is set between them."""

    outputs: Outputs[Any, Any]

    def __init__(
        self, session: Session, setup: Setup, batches: Batches[Any], loader: Loader, previews: Previews[Any], total: int
    ) -> None:
        self.session, self.config, self.setup = session, session.loaded.config, setup
        self.batches, self.loader, self.previews, self.total = batches, loader, previews, total
        self.terminal, self.metrics = session.terminal, session.metrics
        self.fixed: frozenset[Key] = session.loaded.settled
        if not splits(self.config):
            self.fixed |= {MICRO_BATCH}
        self.measured = Measured(session.planning.choice, session.planning.training_peak)
        self.tries, self.last_state = Counter[tuple[str, int]](), time.monotonic()
        self.steps: Iterator[StepReport] | None = None
        self.profiler: Profiler | None = None
        if self.config.memory.profile:
            self.profiler = Profiler(session.folder.path / "perfil", setup.target.device, self.terminal, steps=total)

    def build(self, state: State | None = None, step: int = 0) -> None:
        """What is trained; where it does not fit, by tighter rungs."""
        while isinstance(shortage := attempt(lambda: self.setup.build(state)), Shortage):
            self._drop()
            self._tighten("load", shortage, step)
        self.previews.plan = self.setup.plan

    def restore(self) -> int:
        """Go on from the newest whole state; returns the step to continue at."""
        state = load_state(self.session.folder.state)
        if state is None:
            self.terminal.say(
                t(pt="nenhum estado salvo: começando do passo 0", en="no saved state: starting at step 0")
            )
            return 0
        self.terminal.warn(*changes(state.facts["options"], self.setup.options()))
        if state.facts["data"] != self.batches.dataset.fingerprint():
            self.terminal.warn(data_changed())
        if isinstance(shortage := attempt(lambda: self.setup.load(state)), Shortage):
            self._drop()
            self._tighten("load", shortage, state.step)
            self.build(state, state.step)
        self.metrics.event("resumed", step=state.step)
        done = f"{state.step}/{self.total}"
        self.terminal.phase(t(pt=f"retomando do passo {done}", en=f"resuming at step {done}"))
        return state.step

    # -- out of memory

    def _drop(self) -> None:
        self.steps = None
        vars(self.previews).pop("plan", None)
        self.setup.drop()

    def _tighten(self, phase: str, shortage: Shortage, step: int) -> bool:
        """Take the next rung; whether all must be built anew for it. Raises DoesNotFitError below the last."""
        before, rung = self.setup.rung, next_rung(self.setup.rung, self.fixed, phase)
        self._tell(rung, phase, shortage, step)
        self.setup.rung = rung or before
        return self.setup.rung.values != before.values

    def _tell(self, rung: Rung | None, phase: str, shortage: Shortage, step: int) -> None:
        """What is tried next; None: the same again, a few times. Steps made once more are no progress."""
        self.tries[phase, step] += rung is None
        self.session.planning.tightened(rung, phase, shortage.problem)
        if self.tries[phase, step] > RETRIES:
            raise self.session.planning.failure(phase, shortage.problem)

    def _recover(self, phase: str, shortage: Shortage, step: int) -> int:
        """Back to a whole state under a tighter plan; returns the step to go on at, an earlier one after a torn update."""
        self.steps, optimizer = None, self.setup.optimizer
        torn = shortage.torn or (isinstance(optimizer, StepsInBackward) and optimizer.begun)
        self.setup.forget_gradients()
        state: State | None = None
        try:
            anew = self._tighten("optimizer" if shortage.torn else phase, shortage, step)
            if not torn and not anew:
                return step
            state = self._whole_state(step, torn)
            self._drop()
            self.build(state, step)
        except DoesNotFitError:
            if not torn:
                self._save_at_last(state, step)
            raise
        if torn:
            self._tell_replay(state.step if state is not None else 0)
        return state.step if state is not None else 0

    def _whole_state(self, step: int, torn: bool) -> State | None:
        """What was learned up to `step`; where that is torn, as far as it was saved, if it was."""

        def take() -> State | None:
            return load_state(self.session.folder.state) if torn else self._state(step)

        while isinstance(state := attempt(take), Shortage):
            self._tell(None, "save", state, step)
        return state

    def _save_at_last(self, state: State | None, step: int) -> None:
        """Before giving up: so that the run can go on elsewhere, or with other options."""
        saved = attempt(lambda: self.save_state(step) if state is None else self._write_state(state))
        if isinstance(saved, Shortage):
            self.terminal.warn(
                t(pt=f"o estado não foi salvo: {saved.problem}", en=f"the state was not saved: {saved.problem}")
            )

    def _tell_replay(self, step: int) -> None:
        """Rows of the metrics that follow are of steps made once more."""
        self.metrics.event("resumed", step=step)
        self.terminal.note(
            t(
                pt=f"a atualização dos pesos ficou pela metade: de volta ao passo {step}",
                en=f"the weights were half updated: back to step {step}",
            )
        )

    def _sheltered(self, phase: str, step: int, duty: Callable[[], Any]) -> Any:
        """What is due between two steps; where memory is short, again under tighter plans."""
        while isinstance(result := attempt(duty), Shortage):
            self._recover(phase, result, step)
        return result

    # -- the steps

    def loop(self, start: int) -> None:
        """All steps from `start` (optimizer steps already made) to the last, and what is due between them."""
        step, self.last_state = start, time.monotonic()
        if start == 0 and self.batches.dataset.validation:
            self._sheltered("validation", 0, lambda: self.validate(0))
        with self.terminal.bar(t(pt="treino", en="training"), self.total, start) as bar:
            while step < self.total:
                before = time.monotonic()
                report = self._next_report(step)
                if isinstance(report, Shortage):
                    step = self._recover("train", report, step)
                    bar.advance(step - bar.done)
                    continue
                step = report.step
                self._record(report, time.monotonic() - before)
                peak = gib(self.session.phases.current_peak())
                bar.advance(1, f"{t(pt='perda', en='loss')} {report.loss:.4f}  {peak}")
                self._after_step(step)

    def _next_report(self, step: int) -> StepReport | Shortage:
        steps = self.steps or training_loop(self.setup.trainee(), self._windows(step), self._factor)
        self.steps = steps
        try:
            return attempt(lambda: self._watched(steps, step))
        except DivergedError as error:
            raise DivergedError(error.problem, f"{error.hint}; {self.outputs.last_good()}") from error

    def _watched(self, steps: Iterator[StepReport], step: int) -> StepReport:
        if self.profiler is None:
            return next(steps)
        with self.profiler.step(step + 1, self.setup.trainee()):
            return next(steps)

    def _windows(self, start: int) -> Iterator[tuple[int, list[Batch]]]:
        for step in range(start, self.total):
            yield step, [self.loader.load_batch(draws) for draws in self._split(self.batches.window(step))]

    def _split(self, window: list[list[Draw]]) -> list[list[Draw]]:
        """The same examples in micro-batches no larger than the rung allows."""
        return [part for draws in window for part in self.batches.split(draws, self.setup.rung.micro_batch)]

    def _factor(self, step: int) -> float:
        return schedules.lr_factor(step, self.total, self.config.training)

    def _record(self, report: StepReport, seconds: float) -> None:
        self.metrics.write(
            step=report.step,
            epoch=self.batches.epoch(report.step - 1) + 1,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.learning_rate,
            samples_per_s=round(report.terms / max(seconds, 1e-9), 3),
            peak_vram=self.session.phases.current_peak(),
        )
        if warning := self.measured.step(seconds):
            self.terminal.warn(warning)

    def _probe_worst(self, step: int) -> None:
        """Gradients of the batch that needs most memory, thrown away: what does not fit shows now, not in an hour.

        After the first step, when the optimizer's state is there too; twice where a window accumulates, beside its gradients.
        """
        worst = self.batches.worst()
        seen = max(self.batches.cost(draws) for draws in self.batches.window(step - 1))
        if seen >= self.batches.cost(worst) or isinstance(self.setup.optimizer, StepsInBackward):
            return
        times = min(2, len(self._split(self.batches.window(step))))
        batch = self.loader.load_batch(self._split([worst])[0])
        gradients(self.setup.trainee(), [batch] * times, step, self.setup.target.family.num_terms(batch))
        self.setup.forget_gradients()
        self.steps = None

    # -- between two steps

    def _after_step(self, step: int) -> None:
        """Saves, validation and previews that are due, then the user's wish to stop."""
        output, samples, last = self.config.output, self.config.samples, step == self.total
        due = output.save_every and step % output.save_every == 0
        timed = not output.save_every and time.monotonic() - self.last_state > STATE_EVERY_SECONDS
        every = self.config.training.validate_every or self.batches.steps_per_epoch
        if not self.measured.probed and not last:
            rung = self.setup.rung
            self._sheltered("train", step, lambda: self._probe_worst(step))
            self.measured.probe_done(plan_changed=self.setup.rung is not rung)
        if due and not last:
            self._sheltered("save", step, lambda: self.save_intermediate(step))
        if self.batches.dataset.validation and (step % every == 0 or last):
            self._sheltered("validation", step, lambda: self.validate(step))
        if samples.prompts and samples.every and step % samples.every == 0 and not last:
            self._sheltered("preview", step, lambda: self.preview(step))
        if due or timed or self.session.stop or last:
            self._sheltered("save", step, lambda: self.save_state(step))
        if self.session.stop and not last:
            done = f"{step}/{self.total}"
            raise Interrupted(
                t(
                    pt=f"interrompido no passo {done}; o estado está salvo",
                    en=f"interrupted at step {done}; the state is saved",
                ),
                t(pt="continue com --retomar", en="go on with --resume"),
            )

    def preview(self, step: int) -> None:
        with averages.evaluation_weights(self.setup.optimizer):
            self.previews.draw(self.setup.model, self.setup.adapter, step, self.session.folder)

    def last_preview(self) -> None:
        """With the adapter as it will be written, and its measure, if one is asked for."""

        def draw() -> None:
            with averages.evaluation_weights(self.setup.optimizer):
                if self.config.samples.prompts:
                    self.previews.draw(self.setup.model, self.setup.adapter, self.total, self.session.folder)
                self.previews.measure_after(self.setup.model)

        self._sheltered("preview", self.total, draw)

    def save_intermediate(self, step: int) -> None:
        """A full disk is told, and training goes on."""
        try:
            with averages.evaluation_weights(self.setup.optimizer):
                path = self.outputs.save(self.setup.adapter, step, intermediate=True)[0]
        except MachineError as error:
            self.terminal.warn(str(error))
            self.metrics.event("not_saved", step=step, problem=error.problem)
            return
        self.metrics.event("saved", step=step, file=path.name)

    def save_state(self, step: int) -> None:
        """A full disk is told, and training goes on (at the end, to the file that matters); when stopping, an error."""
        if not self.setup.adapter.is_finite():
            raise DivergedError.said(
                pt=f"o LoRA tem valores não finitos no passo {step}; nada foi gravado",
                en=f"the LoRA is not finite at step {step}; nothing was written",
                hint_pt="reduza treino.taxa_aprendizado",
                hint_en="lower training.learning_rate",
            )
        self._write_state(self._state(step))
        self.last_state = time.monotonic()

    def _state(self, step: int) -> State:
        return self.setup.state(step, self.batches.dataset.fingerprint())

    def _write_state(self, state: State) -> None:
        try:
            save_state(self.session.folder.state, state)
        except UserError as error:
            if self.session.stop:
                raise
            self.terminal.warn(str(error))
            self.metrics.event("state_not_saved", step=state.step, problem=error.problem)

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Mean loss of the held-out images: the same noise and timesteps every time."""
        setup, total, terms = self.setup, 0.0, 0
        size = min(self.config.training.batch_size, setup.rung.micro_batch)
        setup.model.eval()
        try:
            with averages.evaluation_weights(setup.optimizer):
                for batch in self.loader.validation_batches(size):
                    with setup.plan.step_context():
                        total += setup.target.family.loss(setup.model, to_device(batch, setup.target.device)).item()
                    terms += setup.target.family.num_terms(batch)
        finally:
            setup.model.train()
        mean = total / terms
        facts = setup.target.family.loss_facts(mean)
        self.metrics.write(step=step, validation_loss=mean, **facts)
        more = "".join(f", {name} {value:.2f}" for name, value in facts.items())
        self.terminal.note(
            t(pt=f"passo {step}: perda de validação {mean:.5f}{more}", en=f"step {step}: validation loss {mean:.5f}{more}")
        )

    def finish(self) -> list[str]:
        """Write the final files and prove each; the lines that "done" prints."""

        def save() -> list[str]:
            with averages.evaluation_weights(self.setup.optimizer):
                return self.outputs.finish(self.setup.model, self.setup.adapter, self.total)

        return list(self._sheltered("save", self.total, save))
