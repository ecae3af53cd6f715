"""The picture grid and the plot: sizes, labels, order, and odd input."""

import json

import numpy as np
import torch
from PIL import Image

from lora_trainer.plot import plot_metrics, smooth
from lora_trainer.preview import LABEL_HEIGHT, MARGIN, make_grid, to_image


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
