"""Every shipped preset, at full size, fits its card as the comment in its file says: captions, images and previews too."""

import re
from collections.abc import Iterator

import pytest

from lora_trainer.config import presets
from lora_trainer.config.loading import load
from lora_trainer.config.names import options
from lora_trainer.families import family_class
from lora_trainer.planner.ladder import SOLVED
from lora_trainer.planner.picker import preset_budget
from lora_trainer.planner.presets import MARK, card_of, predict_with_previews

SHAPES = {name: sizes for name in presets.families() if (sizes := family_class(name).sizes)}
PLACES = [
    (name, family, size)
    for name in presets.names()
    for family in presets.families()
    for size in SHAPES.get(family, [None])
]
SIMULATED = [place for place in PLACES if place[1] != "causal_lm" and place != ("4gb", "flux2", 40.0)]  # which has no room
SIMULATED += [("4gb", "causal_lm", 10.0), ("24gb", "causal_lm", 2.0)]
"""Of language models, two; python -m lora_trainer.planner.presets does all."""


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Presets that train the same are simulated once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def section(name: str, family: str, size: float | None) -> str | None:
    """The text of a preset from the name of a family or size on."""
    text = presets.path_of(name).read_text(encoding="utf-8")
    found = re.search(rf"^  {family}:.*?(?=^  \w|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{name} says nothing of {family}"
    if size is None:
        return found[0]
    sized = re.search(rf"^      {size:g}b:.*", found[0], re.MULTILINE | re.DOTALL)
    return sized[0] if sized else None


def stated(name: str, family: str, size: float | None) -> tuple[float, list[str]]:
    """(GiB, the plan as arguments) of the comment under the name of a family or size."""
    text = section(name, family, size)
    assert text is not None
    line = next(line for line in text.splitlines() if MARK in line)
    values = dict(re.findall(r"(\w+): ([\w.]+)", line.partition("sobram")[2]))
    shown = {options()[key].shown("pt") for key in SOLVED}
    return float(re.findall(r"[\d.]+", line)[0]), [f"{key}={values.get(key.partition('.')[2], 'nao')}" for key in shown]


@pytest.mark.parametrize(("name", "family", "size"), SIMULATED)
def test_a_preset_fits_its_card_as_it_says(name: str, family: str, size: float | None) -> None:
    peak, plan = stated(name, family, size)
    base = f"modelo.familia={family}" if size is None else f"modelo.arquitetura={SHAPES[family][size]}"
    predicted = predict_with_previews(load(presets.path_of(name), [base, *plan], required=()))
    assert predicted is not None
    assert predicted.fits
    assert predicted.peak <= preset_budget(name) == card_of(name).budget
    assert predicted.peak / 2**30 == pytest.approx(peak, abs=0.02)


@pytest.mark.parametrize(("name", "family", "size"), PLACES)
def test_what_is_stated_fits(name: str, family: str, size: float | None) -> None:
    if section(name, family, size) is not None:  # a size that a card cannot hold is left out
        assert 0 < stated(name, family, size)[0] <= round(preset_budget(name) / 2**30, 2)


@pytest.mark.parametrize(("family", "size"), sorted({place[1:] for place in PLACES}, key=str))
def test_a_larger_card_is_never_slower(family: str, size: float | None) -> None:
    """What a preset's plan gives up (recomputation, streaming) never grows with the card."""
    plans = [stated(name, family, size)[1] for name in presets.names() if section(name, family, size) is not None]
    stored = [next(word for word in plan if "quantizacao_base=" in word) for plan in plans]
    for bits in set(stored):  # more bits may cost what fewer did not
        words = [" ".join(sorted(plan)) for plan, own in zip(plans, stored, strict=True) if own == bits]
        shares = [float((re.findall(r"streaming_blocos=([\d.]+)", text) or ["0"])[0]) for text in words]
        assert shares == sorted(shares, reverse=True)
        recomputed = ["checkpoint_gradiente=sim" in text for text in words]
        assert recomputed == sorted(recomputed, reverse=True)
