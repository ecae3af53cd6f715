"""Every shipped preset, at full size, fits its card as the comment in its file says: captions, images and previews too."""

import re
from collections.abc import Iterator

import pytest

from lora_trainer.config import presets
from lora_trainer.config.loading import load
from lora_trainer.config.names import options
from lora_trainer.memory.options import SOLVED
from lora_trainer.memory.presets import MARK, SHAPES, card_of, predict_with_previews
from lora_trainer.picker import preset_budget

FAMILIES = ("sd15", "sdxl", "flux")
SIZED = (("4gb", 10.0), ("24gb", 2.0))
"""Presets and sizes of language models that are simulated here; python -m lora_trainer.memory.presets does all."""


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Presets that train the same are simulated once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def stated(name: str, place: str) -> tuple[float, list[str]]:
    """(GiB, the plan as arguments) of the comment under the name of a family or size."""
    text = presets.path_of(name).read_text(encoding="utf-8")
    line = next(line for line in text.partition(f"\n{place}:")[2].splitlines() if MARK in line)
    values = dict(re.findall(r"(\w+): ([\w.]+)", line.partition("sobram")[2]))
    shown = {options()[key].shown("pt") for key in SOLVED}
    return float(re.findall(r"[\d.]+", line)[0]), [f"{key}={values.get(key.partition('.')[2], 'nao')}" for key in shown]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", presets.names())
def test_a_preset_fits_its_card_as_it_says(name: str, family: str) -> None:
    peak, plan = stated(name, f"  {family}")
    predicted = predict_with_previews(load(presets.path_of(name), [f"modelo.familia={family}", *plan], required=()))
    assert predicted is not None
    assert predicted.fits
    assert predicted.peak <= preset_budget(name) == card_of(name).budget
    assert predicted.peak / 2**30 == pytest.approx(peak, abs=0.02)


@pytest.mark.parametrize(("name", "size"), SIZED)
def test_a_size_of_language_models_fits_as_it_says(name: str, size: float) -> None:
    peak, plan = stated(name, f"      {size:g}b")
    arguments = [f"modelo.arquitetura={SHAPES[size]}", *plan]
    predicted = predict_with_previews(load(presets.path_of(name), arguments, required=()))
    assert predicted is not None
    assert predicted.fits
    assert predicted.peak / 2**30 == pytest.approx(peak, abs=0.02)


def test_what_is_stated_of_every_size_fits() -> None:
    for name in presets.names():
        text = presets.path_of(name).read_text(encoding="utf-8")
        for size in re.findall(r"^(      \d+b):", text, re.MULTILINE):
            assert 0 < stated(name, size)[0] <= round(preset_budget(name) / 2**30, 2), (name, size)


@pytest.mark.parametrize("place", ["  sd15", "  sdxl", "      2b", "      5b", "      10b", "      16b"])
def test_a_larger_card_is_never_slower(place: str) -> None:
    """What a preset's plan gives up (recomputation, streaming) never grows with the card."""
    plans = [stated(name, place)[1] for name in presets.names()]
    kept = [[word for word in plan if "quantizacao_base=nf4" in word] for plan in plans]
    for bits in ([], ["memoria.quantizacao_base=nf4"]):  # more bits may cost what fewer did not
        words = [" ".join(sorted(plan)) for plan, own in zip(plans, kept, strict=True) if own == bits]
        shares = [float((re.findall(r"streaming_blocos=([\d.]+)", text) or ["0"])[0]) for text in words]
        assert shares == sorted(shares, reverse=True)
        recomputed = ["checkpoint_gradiente=sim" in text for text in words]
        assert recomputed == sorted(recomputed, reverse=True)
