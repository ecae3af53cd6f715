"""The order of phases, from a checked config to a verified adapter file. Only this module knows it.

config → device and precision → optimizer probe → base opened (headers) → images checked → captions and images encoded →
model, adapter, techniques → loop with saves, validation and previews → file verified by the consumer's loader.
"""

import gc
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from torch import nn

from . import adapters, hardware, optimizers, schedules
from .checkpoint import State, load_state, save_state
from .config import effective
from .config.loading import Loaded
from .config.schema import TrainingConfig
from .data import dataset as data
from .data.batches import BatchPlan, Loader
from .data.cache import Cache
from .data.encode import EncodeCounts, Encoder, caches_text, encode_dataset
from .data.report import summary_lines, token_lines
from .errors import DivergedError, Interrupted, UserError, t
from .families import resolve
from .families._base import Batch
from .interrupt import StopRequest, stop_on_signals
from .loop import StepReport, Trainee, to_device
from .loop import train as training_loop
from .memory._base import MemoryPlan, Technique
from .memory.gradient_checkpointing import GradientCheckpointing
from .memory.mixed_precision import MixedPrecision
from .memory.optimizer_8bit import Optimizer8bit
from .outputs import Outputs
from .preview import Previews
from .progress import Metrics, Phases, Terminal, gib, peak_resident_bytes, write_json
from .run_folder import Lock, RunFolder, prepare

STATE_EVERY_SECONDS = 180.0
"""How often the state is saved when `saida.salvar_cada` does not say."""


def train(loaded: Loaded, *, resume: bool = False, restart: bool = False) -> None:
    """Train as the config says. Raises UserError subclasses, whose `exit_code` the command line returns."""
    folder = RunFolder(loaded.run_dir, loaded.name)
    with stop_on_signals() as stop, Lock(folder):
        note = prepare(folder, resume=resume, restart=restart)
        terminal, metrics = Terminal(folder.path / "registro.log"), Metrics(folder.metrics)
        handler = terminal.log_handler()
        logging.getLogger("lora_trainer").addHandler(handler)
        try:
            if note:
                terminal.say(note)
            Run(loaded, folder, terminal, metrics, stop).go(resume=resume)
        except UserError as error:
            metrics.event("stopped", reason=type(error).__name__, problem=error.problem)
            terminal.note(str(error))
            raise
        finally:
            logging.getLogger("lora_trainer").removeHandler(handler)
            metrics.close()
            terminal.close()


class Run:
    """One run. Every method is one phase; attributes appear in the order of `go`."""

    def __init__(
        self, loaded: Loaded, folder: RunFolder, terminal: Terminal, metrics: Metrics, stop: StopRequest
    ) -> None:
        self.loaded, self.config, self.folder = loaded, loaded.config, folder
        self.terminal, self.metrics, self.stop = terminal, metrics, stop

    def go(self, *, resume: bool) -> None:
        self.choose_machine()
        self.open_base()
        self.read_data()
        self.remember_facts()
        if resume and self.already_done():
            return
        with self.phases.phase("cache"):
            self.encode()
        with self.phases.phase("load"):
            self.load_model()
        start = self.restore() if resume else 0
        self.previews.measure_before(self.model, self.adapter)
        with self.phases.phase("train"), self.stop.waiting_for_step():
            self.loop(start)
        self.finish()

    # -- before anything large is loaded

    def choose_machine(self) -> None:
        for notice in self.loaded.notices:
            self.terminal.warn(notice)
        if self.config.system.threads:
            torch.set_num_threads(self.config.system.threads)
        self.device, notices = hardware.choose_device(self.config.system.device)
        self.precision = hardware.choose_precision(self.config.training.mixed_precision, self.device)
        notices = [*notices, *self.precision.notices]
        notices += optimizers.optimizer_notices(self.config.training, self.device)
        for notice in notices:
            self.terminal.warn(notice)
        self.phases = Phases(self.device)
        quiet_libraries()
        optimizers.probe(self.config.training, self.device)

    def open_base(self) -> None:
        self.family = resolve(self.config.model, self.config.data)
        self.family.configure(self.config.training, self.config.data)
        self.terminal.phase(f"base: {self.family.title} · {self.family.source.title()}")
        for notice in self.family.notices:
            self.terminal.warn(notice)

    def read_data(self) -> None:
        self.cache_dir = Path(self.config.data.cache_dir or Path(self.config.output.dir) / ".cache")
        with self.terminal.steps() as progress:
            self.dataset = data.build(
                self.config.data,
                self.cache_dir,
                side_multiple=self.family.side_multiple,
                exclude=[Path(self.config.output.dir)],
                progress=progress,
            )
        for warning in self.dataset.notes.warnings:
            self.terminal.warn(warning)
        for note in self.dataset.notes.notes:
            self.terminal.say(note)

    def remember_facts(self) -> None:
        """What a first start draws, a resumed one reads: the seed and the day."""
        facts = self.folder.read_facts()
        seed = self.config.system.seed
        if seed is None:
            seed = facts.get("seed", random.SystemRandom().randrange(2**31))
        self.seed, self.day = int(seed), str(facts.get("day", date.today().isoformat()))
        write_json(self.folder.facts, {"seed": self.seed, "day": self.day})
        loaded = self.loaded
        if self.config.system.seed is None:
            system = self.config.system.model_copy(update={"seed": self.seed})
            origins = {**loaded.origins, "sistema.semente": t(pt="sorteada", en="drawn")}
            loaded = replace(loaded, config=self.config.model_copy(update={"system": system}), origins=origins)
            self.terminal.say(t(pt=f"semente sorteada: {self.seed}", en=f"seed drawn: {self.seed}"))
        self.loaded, self.config = loaded, loaded.config
        effective.write(loaded, self.folder.path / "config.yaml")
        training = self.config.training
        self.batches = BatchPlan(self.dataset, training.batch_size, training.gradient_accumulation_steps, self.seed)
        planned = training.epochs * self.batches.steps_per_epoch
        self.total = min(planned, training.max_steps or planned)

    def already_done(self) -> bool:
        state = load_state(self.folder.state)
        if state is None or state.step < self.total or not self.folder.finished:
            return False
        done = f"{state.step}/{self.total}"
        self.terminal.say(
            t(
                pt=f"já terminou ({done}); aumente treino.epocas para continuar",
                en=f"already done ({done}); raise training.epochs to go on",
            )
        )
        return True

    # -- caching phase

    def encode(self) -> None:
        summary = summary_lines(self.batches, self.config.training.epochs)
        for line in [
            *summary,
            *token_lines(self.dataset, self.family.count_tokens, self.config.data.max_caption_tokens),
        ]:
            self.terminal.say(f"  {line}")
        for notice in schedules.schedule_notices(self.total, self.config.training):
            self.terminal.warn(notice)
        dtype = self.precision.frozen
        cached = caches_text(self.config.data.cache_text_encoder, self.config.model.train_text_encoder)
        self.encoder = Encoder(
            self.family, Cache(self.cache_dir), self.config.data, self.family.vae_dtype(dtype), dtype, cached
        )
        self.previews = Previews(self.family, self.config, self.encoder, self.device, self.terminal, self.metrics)
        with self.terminal.steps() as progress:
            counts = encode_dataset(self.dataset, self.encoder, self.device, self.previews.captions(), progress)
        self._say_cache(counts)
        self.loader = Loader(self.dataset, self.encoder, self.seed)

    def _say_cache(self, counts: EncodeCounts) -> None:
        self.terminal.phase(
            t(
                pt=f"cache: {counts.images} imagens ({counts.images_made} codificadas agora), "
                f"{counts.texts} legendas ({counts.texts_made} agora)",
                en=f"cache: {counts.images} images ({counts.images_made} encoded now), "
                f"{counts.texts} captions ({counts.texts_made} now)",
            )
        )

    # -- model

    def load_model(self) -> None:
        self.plan = make_plan(self.config.training, self.precision, self.device)
        with_text = not self.encoder.cache_text
        self.model: nn.ModuleDict = self.family.load_model(
            self.device,
            self.precision.frozen,
            with_text=with_text,
            prepare=lambda model: self.plan.convert(model, self.family.blocks(model)),
        )
        groups = self.family.blocks(self.model)
        self.adapter = adapters.inject(self.model, self.family, self.config.model, self.seed)
        if self.config.model.initial_lora:
            self.adapter.load_file(Path(self.config.model.initial_lora))
        hardware.assert_trainable_float32(self.model)
        self.plan.wrap(self.model, groups)
        named = self.adapter.named_parameters()
        self.optimizer = self.plan.build_optimizer(
            optimizers.param_groups(named, self.config.training), self.config.training
        )
        self.scaler = self.plan.scaler()
        self.previews.plan = self.plan
        rows = [
            [row.component, row.dtype, row.device, f"{row.parameters:,}"] for row in hardware.describe_parts(self.model)
        ]
        title = t(pt="componente / precisão / dispositivo", en="component / dtype / device")
        self.terminal.table(title, ["", "", "", t(pt="parâmetros", en="parameters")], rows)
        self.outputs = Outputs(self.loaded, self.folder, self.adapter, self.batches, self.day, self.total)

    def restore(self) -> int:
        """Go on from the newest whole state; returns the step to continue at."""
        state = load_state(self.folder.state)
        if state is None:
            self.terminal.say(
                t(pt="nenhum estado salvo: começando do passo 0", en="no saved state: starting at step 0")
            )
            return 0
        if state.facts["data"] != self.dataset.fingerprint():
            self.terminal.warn(
                t(
                    pt="as imagens, legendas ou buckets mudaram desde o estado salvo; a ordem daqui em diante é a do conjunto novo",
                    en="images, captions or buckets changed since the state was saved; from here on the order is the new set's",
                )
            )
        self.adapter.load_state_dict(state.adapter)
        self.optimizer.load_state_dict(state.optimizer)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates(), strict=True):
            group["base_lr"] = rate  # the config's, in case it changed
        self.scaler.load_state_dict(state.scaler)
        self.metrics.event("resumed", step=state.step)
        self.terminal.phase(
            t(pt=f"retomando do passo {state.step}/{self.total}", en=f"resuming at step {state.step}/{self.total}")
        )
        return state.step

    def _base_rates(self) -> list[float]:
        return [
            float(group["base_lr"])
            for group in optimizers.param_groups(self.adapter.named_parameters(), self.config.training)
        ]

    # -- loop

    def loop(self, start: int) -> None:
        training = self.config.training
        trainee = Trainee(
            self.family,
            self.model,
            list(self.adapter.named_parameters().values()),
            self.optimizer,
            self.scaler,
            self.plan,
            self.device,
            self.seed,
            training.max_grad_norm,
        )
        self.step, self.last_state, before = start, time.monotonic(), time.monotonic()
        with self.terminal.bar(t(pt="treino", en="training"), self.total, start) as bar:
            try:
                for report in training_loop(trainee, self._windows(start), self._factor):
                    self.step, now = report.step, time.monotonic()
                    self._record(report, now - before)
                    bar.advance(1, f"{t(pt='perda', en='loss')} {report.loss:.4f}  {gib(self.phases.current_peak())}")
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
            peak_vram=self.phases.current_peak(),
        )

    def _after_step(self, step: int) -> None:
        """Saves, validation and previews that are due, then the user's wish to stop."""
        output, samples = self.config.output, self.config.samples
        due = output.save_every and step % output.save_every == 0
        timed = not output.save_every and time.monotonic() - self.last_state > STATE_EVERY_SECONDS
        every = self.config.training.validate_every or self.batches.steps_per_epoch
        with optimizers.evaluation_weights(self.optimizer):
            if due and step < self.total:
                path = self.outputs.save(step, intermediate=True)[0]
                self.metrics.event("saved", step=step, file=path.name)
            if self.dataset.validation and (step % every == 0 or step == self.total):
                self.validate(step)
            if samples.prompts and samples.every and step % samples.every == 0 and step < self.total:
                self.previews.draw(self.model, self.adapter, step, self.folder)
        if due or timed or self.stop or step == self.total:
            self.save_state(step)
        if self.stop and step < self.total:
            raise Interrupted(
                t(
                    pt=f"interrompido no passo {step}/{self.total}; o estado está salvo",
                    en=f"interrupted at step {step}/{self.total}; the state is saved",
                ),
                t(pt="continue com --retomar", en="go on with --resume"),
            )

    def save_state(self, step: int) -> None:
        if not self.adapter.is_finite():
            raise DivergedError(
                t(
                    pt=f"o LoRA tem valores não finitos no passo {step}; nada foi gravado",
                    en=f"the LoRA is not finite at step {step}; nothing was written",
                ),
                t(pt="reduza treino.taxa_aprendizado", en="lower training.learning_rate"),
            )
        state = State(
            step,
            self.adapter.state_dict(),
            self.optimizer.state_dict(),
            self.scaler.state_dict(),
            {"data": self.dataset.fingerprint(), "seed": self.seed},
        )
        try:
            save_state(self.folder.state, state)
        except UserError as error:
            if self.stop or step == self.total:
                raise
            self.terminal.warn(str(error))
            self.metrics.event("state_not_saved", step=step, problem=error.problem)
        self.last_state = time.monotonic()

    @torch.no_grad()
    def validate(self, step: int) -> None:
        self.model.eval()
        total, terms = 0.0, 0
        for batch in self.loader.validation_batches(self.config.training.batch_size):
            with self.plan.step_context():
                total += self.family.loss(self.model, to_device(batch, self.device)).item()
            terms += self.family.num_terms(batch)
        self.model.train()
        self.metrics.write(step=step, validation_loss=total / terms)
        self.terminal.note(
            t(
                pt=f"passo {step}: perda de validação {total / terms:.5f}",
                en=f"step {step}: validation loss {total / terms:.5f}",
            )
        )

    # -- end

    def finish(self) -> None:
        with optimizers.evaluation_weights(self.optimizer), self.phases.phase("preview"):
            if self.config.samples.prompts:
                self.previews.draw(self.model, self.adapter, self.total, self.folder)
            self.previews.measure_after(self.model)
        with optimizers.evaluation_weights(self.optimizer), self.phases.phase("save"):
            lines = self.outputs.finish(self.model, self.total)
        write_json(
            self.folder.path / "plano.json",
            {
                "techniques": [type(technique).__name__ for technique in self.plan.ordered()],
                "device": str(self.device),
                "precision": self.precision.name,
                "peak_bytes": self.phases.peaks,
                "peak_rss": peak_resident_bytes(),
            },
        )
        write_json(self.folder.state / "concluido.json", {"steps": self.total})
        self.metrics.event(
            "done", step=self.total, files=[path.name for path in self.outputs.written], peak_rss=peak_resident_bytes()
        )
        self.outputs.plot()
        for line in lines:
            self.terminal.say(line, style="green")
        del self.model
        gc.collect()


def quiet_libraries() -> None:
    """Their bars would break ours, and their remarks are not about anything that the user can change."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()


def make_plan(training: TrainingConfig, precision: hardware.Precision, device: torch.device) -> MemoryPlan:
    """The techniques that the config asks for."""
    techniques: list[Technique] = []
    if training.gradient_checkpointing != "no":
        techniques.append(GradientCheckpointing())
    if precision.compute != torch.float32:
        techniques.append(MixedPrecision("bf16" if precision.compute is torch.bfloat16 else "fp16", device.type))
    if training.use_8bit_optimizer == "yes":
        techniques.append(Optimizer8bit())
    return MemoryPlan(tuple(techniques))
