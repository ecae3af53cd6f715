"""Pictures drawn when memory runs out (F05); the picture grid and the plot: sizes, labels, order, and odd input."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import built, good
from helpers.original_checkpoint import write_single_file
from PIL import Image
from torch import nn

from lora_trainer import adapters, families
from lora_trainer.config.schema import Config, DataConfig, ModelConfig, SamplesConfig
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Encoder, encode_dataset
from lora_trainer.data.preview import LABEL_HEIGHT, MARGIN, ImagePreviews, make_grid, to_image
from lora_trainer.engine.tracker import MemoryTracker, mark_resident
from lora_trainer.journal.plot import plot_metrics, smooth
from lora_trainer.journal.progress import Metrics, Terminal
from lora_trainer.journal.run_folder import RunFolder
from lora_trainer.machine.hardware import Precision
from lora_trainer.modality import Desk
from lora_trainer.planner.caching import Encoding
from lora_trainer.seam.family import Family, Sampling
from lora_trainer.techniques import MemoryPlan

CPU, FP32 = torch.device("cpu"), torch.float32
PROMPTS = ["a photo of a cat", "on red", "a cat"]
OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")


def desk(config: Config, metrics: Metrics) -> Desk:
    def heard(phase: str, rung: str) -> None:
        metrics.event("oom", phase=phase, rung=rung)

    return Desk(config, CPU, Precision(FP32, FP32, False), Terminal(), metrics, 0, Encoding(), heard)


class Studio:
    """Everything that previews are drawn with, at tiny size."""

    def __init__(self, root: Path, release: str = "sd1") -> None:
        write_single_file(root / "base.safetensors", release)
        model = ModelConfig(base_model=str(root / "base.safetensors"), tokenizer=str(root / "words"))
        self.config = config = Config(
            model=model,
            data=DataConfig(data_dir=str(good(root / "ds", 1)), resolution=(64, 64)),
            samples=SamplesConfig(prompts=PROMPTS, steps=2),
        )
        self.family: Family = families.resolve(model, config.data)
        self.family.configure(config.training, config.data)
        self.encoder = Encoder(self.family, Cache(root / "cache"), config.data, FP32, FP32)
        self.model: nn.ModuleDict = self.family.load_model(CPU, FP32)
        self.adapter = adapters.inject(self.model, self.family, config.model, 0)
        self.open(root)
        encode_dataset(built(root / "ds", resolution=64), self.encoder, CPU, self.previews.captions())

    def open(self, root: Path) -> None:
        """A new run folder, and previews that remember nothing."""
        metrics, self.log = Metrics(), root / "metricas.jsonl"
        metrics.open(self.log)
        self.encoder = replace(self.encoder, encoding=Encoding())
        self.previews = ImagePreviews(self.family, self.encoder, desk(self.config, metrics))
        self.previews.plan = MemoryPlan(())
        self.folder = RunFolder(root, "x")
        self.folder.samples.mkdir(parents=True, exist_ok=True)
        self.model.train()

    def events(self) -> list[tuple[Any, ...]]:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [(row["event"], *([row["rung"]] if "rung" in row else [])) for row in rows]

    def pictures(self, chunk: int = 1, times: int = 1) -> np.ndarray:
        """(N, H, W, 3): every prompt, `times` over."""
        sampling = Sampling((64, 64), steps=2, guidance=4.0, seed=3, chunk=chunk)
        drawn = self.previews._made(self.model, PROMPTS * times, ("", sampling))
        return np.stack([np.asarray(picture, dtype=int) for picture in drawn])


@pytest.fixture(scope="module")
def built_studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    made = Studio(tmp_path_factory.mktemp("studio"))
    gc.collect()
    gc.freeze()  # previews collect garbage; what the libraries hold need not be gone through every time
    yield made
    gc.unfreeze()


@pytest.fixture
def studio(built_studio: Studio, tmp_path: Path) -> Studio:
    built_studio.open(tmp_path)
    return built_studio


def failing(monkeypatch: pytest.MonkeyPatch, family: Family, verb: str, calls: set[int]) -> list[int]:
    made: list[int] = []
    original = getattr(type(family), verb)

    def verb_that_fails(self: Family, *args: Any) -> Any:
        made.append(len(made) + 1)
        if made[-1] in calls:
            raise OOM
        return original(self, *args)

    monkeypatch.setattr(type(family), verb, verb_that_fails)
    return made


def test_f05_out_of_memory_on_the_second_prompt_is_drawn_again_with_care(studio, monkeypatch):
    straight = studio.pictures()
    decoded = failing(monkeypatch, studio.family, "decode_image", {2})
    studio.previews.draw(studio.model, studio.adapter, 10, studio.folder)
    assert studio.events() == [("oom", "one"), ("preview",)]
    assert len(decoded) == 2 + 3 + 3, "two until it fails, three of the base again, three with the adapter"
    assert studio.model.training
    studio.previews.draw(studio.model, studio.adapter, 20, studio.folder)
    assert [event[0] for event in studio.events()] == ["oom", "preview", "preview"]
    assert (studio.folder.samples / "passo-000020.png").exists()
    assert (studio.pictures() == straight).all()


def test_pictures_do_not_depend_on_how_many_are_drawn_at_once(studio):
    one, three = studio.pictures(1), studio.pictures(3)
    assert np.abs(one - three).max() <= 1  # of 255
    assert np.abs(one[0] - one[1]).max() > 10


@pytest.mark.parametrize("drawn", ["sample", "decode_image"])
def test_what_cannot_be_drawn_is_skipped_and_told_once(studio, monkeypatch, capsys, drawn):
    random = torch.get_rng_state()
    failing(monkeypatch, studio.family, drawn, set(range(100)))
    for step in (10, 20):
        studio.previews.draw(studio.model, studio.adapter, step, studio.folder)
    failed = [("oom", "skipped"), ("preview_failed",)]
    assert studio.events() == [("oom", "one"), *failed, *failed]
    out = capsys.readouterr().out
    assert "amostra do passo 10 falhou" in out
    assert "amostra do passo 20 falhou" not in out
    assert studio.model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not list(studio.folder.samples.iterdir())


def test_under_a_real_limit_fewer_are_drawn_at_once_and_they_are_the_same(studio):
    """As the demo's measure does it, which draws eight at a time."""
    with MemoryTracker(record=False) as tracker:
        mark_resident(studio.model, tracker)
        expected = studio.pictures(1, times=8)
    with MemoryTracker(limit=int(tracker.peak * 1.02), record=False) as limited:
        mark_resident(studio.model, limited)
        drawn = studio.pictures(24, times=8)
    assert studio.events() == [("oom", "one")]
    assert (drawn == expected).all()
    studio.previews.careful = False
    with MemoryTracker(limit=tracker.peak // 2, record=False), pytest.raises(torch.OutOfMemoryError):
        studio.pictures(3)
    assert studio.events()[1:] == [("oom", "one"), ("oom", "skipped")]


def test_a_measure_without_memory_is_left_out(studio, monkeypatch, capsys):
    from lora_trainer.demo import score

    studio.previews.measure = score
    studio.encoder.read_text = lambda prompt: studio.family.encode_text(encoders, [prompt])[0]
    encoders = studio.family.load_text_encoders(CPU, FP32)
    failing(monkeypatch, studio.family, "sample", set(range(100)))
    studio.previews.measure_before(studio.model, studio.adapter)
    studio.previews.measure_after(studio.model)
    assert studio.previews.score_before is None
    assert studio.events() == [("oom", "one"), ("oom", "skipped")]
    assert "nota do conceito" in capsys.readouterr().out


def test_tiles_as_the_options_say(studio):
    def tiles(choice: str, side: int) -> bool:
        studio.encoder.encoding = replace(Encoding(), preview_tiling=choice)
        return studio.previews._in_tiles((side, side))

    assert [tiles(choice, side) for choice in ("auto", "yes", "no") for side in (512, 1024)] == [
        False, True, True, True, False, False,
    ]  # fmt: skip
    studio.previews.careful = True
    assert [tiles(choice, 512) for choice in ("auto", "yes", "no")] == [True, True, False]


def test_pixels_become_a_picture():
    pixels = torch.tensor([-1.0, 0.0, 1.0, 5.0]).view(1, 1, 4).expand(3, 1, 4)
    assert np.asarray(to_image(pixels))[0, :, 0].tolist() == [0, 128, 255, 255]


def test_grid_places_columns_and_rows():
    def solid(colour):
        return Image.new("RGB", (256, 256), colour)

    sheet = make_grid(["um", "dois"], ["base", "LoRA"], [[solid("red"), solid("green")], [solid("blue"), solid("yellow")]])
    cell = 256 + LABEL_HEIGHT + MARGIN
    assert sheet.getpixel((MARGIN + 5, LABEL_HEIGHT + 5)) == (255, 0, 0)
    assert sheet.getpixel((2 * MARGIN + 256 + 5, LABEL_HEIGHT + 5)) == (0, 0, 255)
    assert sheet.getpixel((MARGIN + 5, LABEL_HEIGHT + cell + 5)) == (0, 128, 0)
    assert sheet.getpixel((2 * MARGIN + 256 + 5, LABEL_HEIGHT + cell + 5)) == (255, 255, 0)


def test_small_pictures_are_enlarged_and_long_prompts_cut():
    picture = Image.new("RGB", (64, 64), "red")
    sheet = make_grid(["palavra " * 200, ""], ["base"], [[picture, picture]])
    assert sheet.width == 2 * MARGIN + 192
    right_edge = np.asarray(sheet)[:, -MARGIN:].reshape(-1, 3)
    assert (right_edge == 255).all()


def test_average_starts_without_bias():
    assert smooth([4.0] * 50) == [4.0] * 50
    assert smooth([0.0] * 40 + [1.0] * 40)[-1] > 0.9


def test_plot_counts_replayed_steps_once_and_survives_an_empty_log(tmp_path):
    log, picture = tmp_path / "metricas.jsonl", tmp_path / "perda.png"
    log.write_text("")
    plot_metrics(log, picture)
    assert not picture.exists()
    rows = [{"step": s, "loss": 1 / s, "lr": 0.1} for s in (1, 2, 3, 2, 3, 4)]
    rows += [{"step": 4, "validation_loss": 0.5}, {"event": "saved", "step": 4}]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_metrics(log, picture)
    assert Image.open(picture).size[0] > 500
