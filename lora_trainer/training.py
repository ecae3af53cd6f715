"""The training phase: model, adapter and optimizer built, resumed, stepped, saved, validated.

run.py knows what comes before and after; loop.py makes the steps; this module does what is due between two of them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import adapters, hardware, optimizers, schedules
from .checkpoint import State, load_state, save_state
from .config import names
from .config.loading import Loaded
from .config.schema import Config
from .data.batches import BatchPlan, Loader
from .errors import ConfigError, DivergedError, Interrupted, MachineError, UserError, t
from .families._base import Batch, Family
from .interrupt import StopRequest
from .loop import StepReport, Trainee, to_device
from .loop import train as training_loop
from .memory._base import MemoryPlan
from .outputs import Outputs
from .preview import Previews
from .progress import Metrics, Phases, Terminal, gib
from .run_folder import RunFolder

STATE_EVERY_SECONDS = 180.0
"""How often the state is saved when `saida.salvar_cada` does not say."""


FIXED = ("training.optimizer", "training.use_8bit_optimizer", "training.lora_plus_ratio")
"""Besides all of `model`, options that a run may not change when it resumes."""
FREE = ("epochs", "max_steps", "validate_every", "gradient_checkpointing")
"""Options of `training` that change nothing of what was trained so far."""


PATHS = {"base_model", "vae", "tokenizer", "architecture", "initial_lora"}


def resume_options(config: Config, seed: int) -> dict[str, Any]:
    """What a state depends on, by "section.option"; paths are left out, since they may move."""
    model = config.model.model_dump(mode="json", exclude=PATHS | {"family"})
    training = config.training.model_dump(mode="json", exclude=set(FREE))
    flat = {f"model.{name}": value for name, value in model.items()}
    flat |= {f"training.{name}": value for name, value in training.items()}
    return {**flat, "system.seed": seed, "data.resolution": list(config.data.resolution)}


def _shown(key: str) -> str:
    section, _, name = key.partition(".")
    return names.options()[section, name].shown()


@dataclass(frozen=True)
class Session:
    """What every part of one run shares."""

    loaded: Loaded
    folder: RunFolder
    terminal: Terminal
    metrics: Metrics
    stop: StopRequest
    phases: Phases
    device: torch.device
    seed: int


class Training:
    """`build` first; then `restore` if the run resumes; then `loop`. `outputs` is set between them."""

    model: nn.ModuleDict
    adapter: adapters.Adapter
    outputs: Outputs

    def __init__(
        self,
        session: Session,
        family: Family,
        plan: MemoryPlan,
        batches: BatchPlan,
        loader: Loader,
        previews: Previews,
        total: int,
    ) -> None:
        self.session, self.config, self.family, self.plan = session, session.loaded.config, family, plan
        self.batches, self.loader, self.previews, self.total = batches, loader, previews, total
        self.terminal, self.metrics = session.terminal, session.metrics

    def build(self, dtype: torch.dtype) -> None:
        """Load the frozen base in `dtype`, put the adapter on it, apply the plan, make the optimizer."""
        config = self.config
        self.model = self.family.load_model(
            self.session.device,
            dtype,
            with_text=not self.loader.encoder.cache_text,
            prepare=lambda model: self.plan.convert(model, self.family.blocks(model)),
        )
        for notice in adapters.check_base(self.model):
            self.terminal.warn(notice)
        groups = self.family.blocks(self.model)
        seed, formats = self.session.seed, config.output.formats
        self.adapter = adapters.inject(self.model, self.family, config.model, seed, formats=formats)
        if config.model.initial_lora:
            self.adapter.load_file(Path(config.model.initial_lora))
        hardware.assert_trainable_float32(self.model)
        self.plan.wrap(self.model, groups)
        self.optimizer = self.plan.build_optimizer(self._param_groups(), config.training)
        self.scaler = self.plan.scaler()

    def _param_groups(self) -> optimizers.Groups:
        return optimizers.param_groups(self.adapter.named_parameters(), self.config.training)

    def restore(self) -> int:
        """Go on from the newest whole state; returns the step to continue at."""
        state = load_state(self.session.folder.state)
        if state is None:
            self.terminal.say(
                t(pt="nenhum estado salvo: começando do passo 0", en="no saved state: starting at step 0")
            )
            return 0
        self._compare(state)
        self.adapter.load_state_dict(state.adapter)
        optimizers.load_state(self.optimizer, state.optimizer, self.config.training)
        self.scaler.load_state_dict(state.scaler)
        self.metrics.event("resumed", step=state.step)
        done = f"{state.step}/{self.total}"
        self.terminal.phase(t(pt=f"retomando do passo {done}", en=f"resuming at step {done}"))
        return state.step

    def _compare(self, state: State) -> None:
        """What changed since the state was saved: refused where it would spoil the run, else told."""
        before, now = state.facts["options"], resume_options(self.config, self.session.seed)
        changed = [key for key in now if before.get(key) != now[key]]
        spoiling = [key for key in changed if key.startswith("model.") or key in FIXED]
        if spoiling:
            listed = "; ".join(f"{_shown(key)}: {before.get(key)} → {now[key]}" for key in spoiling)
            raise ConfigError(
                t(
                    pt=f"não dá para retomar com outras opções de modelo ({listed})",
                    en=f"cannot resume with other options of the model ({listed})",
                ),
                t(
                    pt="use as mesmas, com o mesmo rank e os mesmos alvos, ou comece de novo com --recomecar",
                    en="keep them, with the same rank and targets, or start over with --restart",
                ),
            )
        for key in changed:
            told = f"{_shown(key)}: {before.get(key)} → {now[key]}"
            self.terminal.warn(t(pt=f"mudou desde o estado salvo: {told}", en=f"changed since the saved state: {told}"))
        if state.facts["data"] != self.batches.dataset.fingerprint():
            self.terminal.warn(
                t(
                    pt="as imagens, legendas ou buckets mudaram desde o estado salvo; "
                    "a ordem daqui em diante é a do conjunto novo",
                    en="images, captions or buckets changed since the state was saved; "
                    "from here on the order is the new set's",
                )
            )

    def loop(self, start: int) -> None:
        """All steps from `start` (optimizer steps already made) to the last, and what is due between them."""
        params = list(self.adapter.named_parameters().values())
        session, limit = self.session, self.config.training.max_grad_norm
        trainee = Trainee(
            self.family, self.model, params, self.optimizer, self.scaler, self.plan, session.device, session.seed, limit
        )
        self.last_state = before = time.monotonic()
        with self.terminal.bar(t(pt="treino", en="training"), self.total, start) as bar:
            try:
                for report in training_loop(trainee, self._windows(start), self._factor):
                    self._record(report, time.monotonic() - before)
                    peak = gib(session.phases.current_peak())
                    bar.advance(1, f"{t(pt='perda', en='loss')} {report.loss:.4f}  {peak}")
                    self._after_step(report.step)
                    before = time.monotonic()
            except DivergedError as error:
                raise DivergedError(error.problem, f"{error.hint}; {self.outputs.last_good()}") from error

    def _windows(self, start: int) -> Iterator[tuple[int, list[Batch]]]:
        for step in range(start, self.total):
            yield step, [self.loader.load_batch(draws) for draws in self.batches.window(step)]

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

    def _after_step(self, step: int) -> None:
        """Saves, validation and previews that are due, then the user's wish to stop."""
        output, samples, last = self.config.output, self.config.samples, step == self.total
        due = output.save_every and step % output.save_every == 0
        timed = not output.save_every and time.monotonic() - self.last_state > STATE_EVERY_SECONDS
        every = self.config.training.validate_every or self.batches.steps_per_epoch
        with optimizers.evaluation_weights(self.optimizer):
            if due and not last:
                self.save_intermediate(step)
            if self.batches.dataset.validation and (step % every == 0 or last):
                self.validate(step)
            if samples.prompts and samples.every and step % samples.every == 0 and not last:
                self.previews.draw(self.model, self.adapter, step, self.session.folder)
        if due or timed or self.session.stop or last:
            self.save_state(step)
        if self.session.stop and not last:
            done = f"{step}/{self.total}"
            raise Interrupted(
                t(
                    pt=f"interrompido no passo {done}; o estado está salvo",
                    en=f"interrupted at step {done}; the state is saved",
                ),
                t(pt="continue com --retomar", en="go on with --resume"),
            )

    def save_intermediate(self, step: int) -> None:
        """A full disk is told, and training goes on."""
        try:
            path = self.outputs.save(step, intermediate=True)[0]
        except MachineError as error:
            self.terminal.warn(str(error))
            self.metrics.event("not_saved", step=step, problem=error.problem)
            return
        self.metrics.event("saved", step=step, file=path.name)

    def save_state(self, step: int) -> None:
        """A full disk is told, and training goes on (at the end, to the file that matters); when stopping, an error."""
        if not self.adapter.is_finite():
            raise DivergedError(
                t(
                    pt=f"o LoRA tem valores não finitos no passo {step}; nada foi gravado",
                    en=f"the LoRA is not finite at step {step}; nothing was written",
                ),
                t(pt="reduza treino.taxa_aprendizado", en="lower training.learning_rate"),
            )
        facts = {"data": self.batches.dataset.fingerprint(), "options": resume_options(self.config, self.session.seed)}
        adapter, optimizer, scaler = self.adapter.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()
        try:
            save_state(self.session.folder.state, State(step, adapter, optimizer, scaler, facts))
        except UserError as error:
            if self.session.stop:
                raise
            self.terminal.warn(str(error))
            self.metrics.event("state_not_saved", step=step, problem=error.problem)
        self.last_state = time.monotonic()

    @torch.no_grad()
    def validate(self, step: int) -> None:
        """Mean loss of the held-out images: the same noise and timesteps every time."""
        self.model.eval()
        total, terms = 0.0, 0
        for batch in self.loader.validation_batches(self.config.training.batch_size):
            with self.plan.step_context():
                total += self.family.loss(self.model, to_device(batch, self.session.device)).item()
            terms += self.family.num_terms(batch)
        self.model.train()
        mean = total / terms
        self.metrics.write(step=step, validation_loss=mean)
        self.terminal.note(
            t(pt=f"passo {step}: perda de validação {mean:.5f}", en=f"step {step}: validation loss {mean:.5f}")
        )
