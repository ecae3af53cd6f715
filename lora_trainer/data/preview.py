"""Images drawn during training: the same prompts and noise, base beside adapter, in one labelled PNG.

They are drawn from their own random numbers, and leave the model in training mode.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from ..engine.vae_tiling import decodes_tiled, tiled
from ..errors import t
from ..modality import Desk, Previews
from ..seam.family import Example, ImageFamily, Sampling
from ._work import open_vae
from .encode import Encoder

MARGIN, LABEL_HEIGHT, SMALLEST_CELL = 12, 34, 192


How = tuple[str, Sampling]
"""Negative prompt, and all else."""


class ImagePreviews(Previews[Image.Image]):
    """The same prompts and noise, base beside adapter; with care, one image at a time and in tiles."""

    ending, care = ".png", "one"
    measures: ClassVar = {"demo": "lora_trainer.demo.score"}
    score, score_title = "concept_score", ("nota do conceito", "concept score")
    others = ("olha respostas; este é um modelo de imagem", "looks at answers")

    def __init__(self, family: ImageFamily, encoder: Encoder, desk: Desk) -> None:
        super().__init__(desk)
        self.family, self.encoder, self.device = family, encoder, desk.device
        width, height = self.settings.resolution or desk.config.data.resolution
        guidance = family.usual_guidance if self.settings.guidance is None else self.settings.guidance
        self.sampling = Sampling((width, height), self.settings.steps or family.usual_steps, guidance, self.settings.seed)

    def captions(self) -> list[str]:
        """Every text to encode ahead; the negative prompt is the last of each set."""
        measured = self.measure.PROMPTS if self.measure else []
        texts = [*self.settings.prompts, *measured]
        return [*texts, self.settings.negative_prompt, ""] if texts else []

    def _usual(self) -> How:
        return self.settings.negative_prompt, self.sampling

    def _measured(self) -> How:
        measure, chunk = self.measure, 8
        return "", Sampling(self.sampling.size, measure.INFERENCE_STEPS, measure.GUIDANCE_SCALE, measure.SEED, chunk)

    def _write(self, path: Path, step: int, answers: list[Image.Image]) -> None:
        columns = ["base", t(pt=f"LoRA, passo {step}", en=f"LoRA, step {step}")]
        make_grid(self.settings.prompts, columns, [self.base, answers]).save(path)

    @torch.no_grad()
    def _drawn(self, model: nn.ModuleDict, prompts: Sequence[str], how: How) -> list[Image.Image]:
        negative, sampling = how
        sampling = replace(sampling, chunk=1) if self.careful else sampling
        with _evaluating(model):
            with self.plan.step_context():
                *positive, without = self._conditions(model, [*prompts, negative], sampling.size)
                latents = self.family.sample(model, positive, without, sampling)
            vae = open_vae(self.encoder, self.device)
            with tiled(vae, self._in_tiles(sampling.size)):
                return [to_image(self.family.decode_image(vae, one[None])[0]) for one in latents]

    def _in_tiles(self, size: tuple[int, int]) -> bool:
        choice = self.encoder.encoding.preview_tiling
        return decodes_tiled("yes" if self.careful and choice == "auto" else choice, size)

    def _conditions(self, model: nn.ModuleDict, prompts: Sequence[str], size: tuple[int, int]) -> list[Example]:
        """Encoded prompts: from the cache, or by the encoders in training."""
        extra = self.family.preview_conditions(size)
        if self.desk.config.model.train_text_encoder:
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
