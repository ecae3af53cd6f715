"""Images drawn during training: the same prompts and noise, base beside adapter, in one labelled PNG.

A preview never harms the run: it draws from its own random numbers, leaves the model in training mode, and whatever goes
wrong is reported and forgotten. When memory runs out it is tried again one image at a time and in tiles, as all later ones
are then; if that fails too, it is skipped. The base's pictures are drawn once. A measure (the demo's concept score) looks
at such pictures before and after training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from ..adapters import Adapter
from ..config.names import shown
from ..config.schema import Config
from ..engine.attention import slice_where_unfused
from ..engine.tracker import hold
from ..engine.vae_tiling import decodes_tiled, tiled
from ..errors import ConfigError, t
from ..journal.progress import Metrics, Terminal
from ..journal.run_folder import RunFolder
from ..planner.caching import OnOom
from ..runtime.recover import free_memory, is_out_of_memory
from ..seam.family import Example, ImageFamily, Sampling
from ..techniques import MemoryPlan
from .encode import Encoder

MARGIN, LABEL_HEIGHT, SMALLEST_CELL = 12, 34, 192
MEASURES = {"demo": "lora_trainer.demo.score"}
"""`amostras.medida` -> module with PROMPTS, GUIDANCE_SCALE, INFERENCE_STEPS, SEED and concept_score(images)."""


class ImagePreviews:
    """Draws prompts with the model as it is. `plan` is set when the model is loaded, and whenever it changes."""

    plan: MemoryPlan
    on_oom: OnOom
    """Told of the rung that is taken when memory runs out; an event in the metrics, unless it is set."""

    def __init__(
        self,
        family: ImageFamily,
        config: Config,
        encoder: Encoder,
        device: torch.device,
        terminal: Terminal,
        metrics: Metrics,
    ) -> None:
        self.family, self.encoder, self.device = family, encoder, device
        self.settings, self.terminal, self.metrics = config.samples, terminal, metrics
        self.dtype = encoder.image_dtype
        width, height = self.settings.resolution or config.data.resolution
        guidance = family.usual_guidance if self.settings.guidance is None else self.settings.guidance
        self.sampling = Sampling((width, height), self.settings.steps or family.usual_steps, guidance, self.settings.seed)
        self.trains_text = config.model.train_text_encoder
        self.base_images: list[Image.Image] = []
        self.measure = _measure(self.settings.measure)
        self.score_before: float | None = None
        self.on_oom = lambda phase, rung: metrics.event("oom", phase=phase, rung=rung)
        self.careful = False
        """After the first out-of-memory: one image at a time, in tiles."""
        self._told: set[type[Exception]] = set()

    def captions(self) -> list[str]:
        """Every text to encode ahead; the negative prompt is the last of each set."""
        measured = self.measure.PROMPTS if self.measure else []
        texts = [*self.settings.prompts, *measured]
        return [*texts, self.settings.negative_prompt, ""] if texts else []

    def draw(self, model: nn.ModuleDict, adapter: Adapter, step: int, folder: RunFolder) -> None:
        """Save `amostras/passo-N.png`; a failure is told and training goes on."""
        try:
            if not self.base_images:
                with adapter.disabled():
                    self.base_images = self._pictures(
                        model, self.settings.prompts, self.settings.negative_prompt, self.sampling
                    )
            images = self._pictures(model, self.settings.prompts, self.settings.negative_prompt, self.sampling)
            path = folder.samples / f"passo-{step:06d}.png"
            columns = ["base", t(pt=f"LoRA, passo {step}", en=f"LoRA, step {step}")]
            make_grid(self.settings.prompts, columns, [self.base_images, images]).save(path)
            self.metrics.event("preview", step=step, file=path.name)
        except Exception as error:  # whatever it is, training goes on
            problem = f"{type(error).__name__}: {error}"
            text = t(pt=f"amostra do passo {step} falhou: {error}", en=f"preview at step {step} failed: {error}")
            self._tell_once(error, text)
            self.metrics.event("preview_failed", step=step, problem=problem)
        finally:
            free_memory(self.device)

    def _tell_once(self, error: Exception, text: str) -> None:
        """What goes wrong at every preview is a warning the first time, and then a line of the log."""
        (self.terminal.note if type(error) in self._told else self.terminal.warn)(text)
        self._told.add(type(error))

    def measure_before(self, model: nn.ModuleDict, adapter: Adapter) -> None:
        if self.measure:
            with adapter.disabled():
                self.score_before = self._score(model)
            free_memory(self.device)

    def measure_after(self, model: nn.ModuleDict) -> None:
        if self.measure and self.score_before is not None:
            after = self._score(model)
            if after is None:
                return
            self.metrics.event("concept_score", before=self.score_before, after=after)
            scores = f"{self.score_before:.2f} → {after:.2f}"
            self.terminal.say(
                t(pt=f"nota do conceito, antes → depois: {scores}", en=f"concept score, before → after: {scores}")
            )

    def _measured(self) -> Sampling:
        measure, chunk = self.measure, 8
        return Sampling(self.sampling.size, measure.INFERENCE_STEPS, measure.GUIDANCE_SCALE, measure.SEED, chunk)

    def _score(self, model: nn.ModuleDict) -> float | None:
        """None where there is not enough memory for the pictures."""
        assert self.measure is not None
        try:
            pictures = self._pictures(model, self.measure.PROMPTS, "", self._measured())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._tell_once(error, t(pt=f"nota do conceito: {error}", en=f"concept score: {error}"))
            return None
        return float(self.measure.concept_score(pictures))

    def _pictures(
        self, model: nn.ModuleDict, prompts: Sequence[str], negative: str, sampling: Sampling
    ) -> list[Image.Image]:
        """As many at once as `sampling` says; after an out-of-memory all of them again, with care."""
        while True:
            try:
                return self._drawn(model, prompts, negative, replace(sampling, chunk=1) if self.careful else sampling)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error)  # the error itself holds on to what must be freed
            free_memory(self.device)
            if self.careful:
                self.on_oom("preview", "skipped")
                raise torch.OutOfMemoryError(problem)
            self.careful = True
            self.on_oom("preview", "one")

    @torch.no_grad()
    def _drawn(
        self, model: nn.ModuleDict, prompts: Sequence[str], negative: str, sampling: Sampling
    ) -> list[Image.Image]:
        with _evaluating(model):
            with self.plan.step_context():
                *positive, without = self._conditions(model, [*prompts, negative], sampling.size)
                latents = self.family.sample(model, positive, without, sampling)
            vae = self.family.load_vae(self.device, self.dtype)
            hold(vae)
            slice_where_unfused(vae, self.device, self.family.vae_dtype(self.dtype))
            with tiled(vae, self._in_tiles(sampling.size)):
                return [to_image(self.family.decode_image(vae, one[None])[0]) for one in latents]

    def _in_tiles(self, size: tuple[int, int]) -> bool:
        choice = self.encoder.encoding.preview_tiling
        return decodes_tiled("yes" if self.careful and choice == "auto" else choice, size)

    def _conditions(self, model: nn.ModuleDict, prompts: Sequence[str], size: tuple[int, int]) -> list[Example]:
        """Encoded prompts: from the cache, or by the encoders in training."""
        extra = self.family.preview_conditions(size)
        if self.trains_text:
            texts = [self.family.encode_text(model, [prompt])[0] for prompt in prompts]
        else:
            texts = [self.encoder.read_text(prompt) for prompt in prompts]
        return [{**extra, **text} for text in texts]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _measure(name: str | None) -> Any:
    if name is None:
        return None
    if name not in MEASURES:
        raise ConfigError(
            t(pt=f"{name} é uma medida de modelos de linguagem", en=f"{name} is a measure of language models"),
            t(pt=f"use {', '.join(MEASURES)} ou retire a chave", en=f"use {', '.join(MEASURES)} or remove the key"),
            shown("samples", "measure"),
        )
    import importlib

    return importlib.import_module(MEASURES[name])


def to_image(pixels: torch.Tensor) -> Image.Image:
    """(3, H, W) in [-1, 1] -> RGB picture."""
    scaled = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(scaled.permute(1, 2, 0).cpu().numpy())


def make_grid(rows: Sequence[str], columns: Sequence[str], images: Sequence[Sequence[Image.Image]]) -> Image.Image:
    """A row a prompt, a column a model; small pictures are enlarged so that the labels stay readable."""
    width, height = images[0][0].size
    zoom = max(1, -(-SMALLEST_CELL // min(width, height)))
    width, height = width * zoom, height * zoom
    cell_height = height + LABEL_HEIGHT + MARGIN
    sheet = Image.new(
        "RGB", (MARGIN + len(columns) * (width + MARGIN), LABEL_HEIGHT + len(rows) * cell_height), "white"
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for column, title in enumerate(columns):
        pen.text((MARGIN + column * (width + MARGIN), 10), title, "black", font)
    for row, prompt in enumerate(rows):
        top = LABEL_HEIGHT + row * cell_height
        for column, drawn in enumerate(images):
            picture = drawn[row].resize((width, height), Image.Resampling.BICUBIC)
            sheet.paste(picture, (MARGIN + column * (width + MARGIN), top))
        pen.text((MARGIN, top + height + 6), _fit(prompt, font, sheet.width - 2 * MARGIN), "black", font)
    return sheet


def _fit(text: str, font: Any, width: int) -> str:
    text = " ".join(text.split()) or t(pt="(vazio)", en="(empty)")
    while font.getlength(text) > width and len(text) > 4:
        text = text[: max(3, len(text) - 8)].rstrip("… ") + "…"
    return text
