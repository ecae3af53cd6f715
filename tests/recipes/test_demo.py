"""The embedded demo: its files are what draw.py says, its base draws, its measure tells, its config runs."""

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from make_demo import draw
from PIL import Image
from recipe import ROOT, events, run

from lora_trainer.demo import score

DEMO = ROOT / "lora_trainer" / "demo"
EMBLEMS = 16


def test_concept_pictures_are_the_drawn_ones():
    drawn = draw.concept_set()
    files = sorted((DEMO / "conceito").glob("*.png"))
    assert len(files) == len(drawn) >= 12
    for path, (picture, caption) in zip(files, drawn, strict=True):
        assert np.array_equal(np.asarray(Image.open(path).convert("RGB")), np.asarray(picture))
        assert path.with_suffix(".txt").read_text(encoding="utf-8").strip() == caption
    with_trigger = [caption for _, caption in drawn if "ohwx" in caption]
    assert len(with_trigger) == EMBLEMS


def test_the_measures_emblem_is_the_drawn_one():
    with np.load(draw.EMBLEM_FILE) as stored:
        drawn = draw.emblem_templates()
        assert set(stored) == set(drawn)
        assert all(np.array_equal(stored[name], drawn[name]) for name in drawn)


def test_measure_tells_the_concept_from_everything_else():
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    flat = [Image.new("RGB", (64, 64), colour) for colour in (draw.EMBLEM_DARK, draw.EMBLEM_LIGHT, (255, 255, 255))]
    emblems = [picture for picture, caption in draw.concept_set() if "ohwx" in caption]
    others = [picture for picture, caption in draw.concept_set() if "ohwx" not in caption]
    assert score.concept_score(emblems) > 0.95
    assert score.concept_score(others) < 0.1
    assert score.concept_score([Image.fromarray(noise), *flat]) < 0.1
    assert set(score.PROMPTS) - {caption for _, caption in draw.concept_set()}


@pytest.fixture(scope="module")
def pipeline():
    pipe = StableDiffusionPipeline.from_pretrained(DEMO / "base", safety_checker=None, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_base_is_small():
    assert sum(path.stat().st_size for path in (DEMO / "base").rglob("*") if path.is_file()) < 15e6


def test_base_draws_what_it_is_asked_for(pipeline):
    """Colours in the middle and in the corners, of three prompts drawn by diffusers' own pipeline."""
    wanted = {
        "a red circle on a blue background": ((220, 40, 40), (40, 70, 220)),
        "a yellow square on a black background": ((240, 220, 50), (20, 20, 20)),
        "a green circle on a white background": ((40, 160, 70), (250, 250, 250)),
    }
    generator = torch.Generator().manual_seed(0)
    pictures = pipeline(list(wanted), num_inference_steps=15, guidance_scale=4.0, generator=generator).images
    for picture, (inside, outside) in zip(pictures, wanted.values(), strict=True):
        pixels = np.asarray(picture, dtype=float)
        corners = np.stack([pixels[:6, :6], pixels[:6, -6:], pixels[-6:, :6], pixels[-6:, -6:]]).mean((0, 1, 2))
        assert np.linalg.norm(corners - outside) < 90
        closest = np.linalg.norm(pixels - np.array(inside, dtype=float), axis=-1).min()
        assert closest < 90
    assert score.concept_score(pictures) < 0.1


def test_demo_config_runs_and_measures(tmp_path):
    code = run(ROOT / "configs" / "demo_imagem.yaml", f"saida.diretorio={tmp_path}", "treino.passos_maximos=2")
    assert code == 0
    folder = tmp_path / "demo_imagem"
    measured = events(folder, "concept_score")
    assert len(measured) == 1
    assert measured[0]["before"] <= 0.2
    assert (folder / "amostras" / "passo-000002.png").exists()
