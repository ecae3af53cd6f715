"""The table of cards: found as people write them; what a planned card is."""

import pytest

from lora_trainer.errors import ConfigError
from lora_trainer.machine.cards import COMMON, MODELS, _spelled, model, of_size


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("gtx 1660 super", "GTX 1660 SUPER"), ("NVIDIA GeForce GTX 1660 SUPER", "GTX 1660 SUPER"), ("RTX3060", "RTX 3060"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX 3060 Laptop"), ("rtx 3060 mobile", "RTX 3060 Laptop"), ("4090", "RTX 4090"),
        ("Tesla T4", "Tesla T4"), ("t4", "Tesla T4"), ("p40", "Tesla P40"), ("1060", "GTX 1060 6GB"), 
        ("4060 ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA A100 80GB", "A100 80GB"), ("a6000", "RTX A6000"),
    ],
)  # fmt: skip
def test_names_as_people_write_them(written, found):
    assert model(written).name == found


def test_an_unknown_card_is_told_with_its_nearest():
    with pytest.raises(ConfigError, match="gtx 1661") as caught:
        model("gtx 1661 super")
    assert "GTX 1660 SUPER" in caught.value.hint


def test_every_row_is_found_by_its_own_name_and_stands_alone():
    assert [model(one.name) for one in MODELS] == list(MODELS)
    assert len({_spelled(one.name) for one in MODELS}) == len(MODELS)


def test_sizes_stand_for_common_cards():
    assert all(abs(model(name).mib / 1024 - size) < 1 for size, name in COMMON.items())
    assert of_size(5.5).name == COMMON[6]


def test_a_planned_card_has_what_an_idle_desktop_leaves():
    card = model("RTX 3060").card()
    assert card.total == 12 * 2**30
    assert card.free == card.total - 600 * 2**20
    assert model("Tesla T4").card().free == 15360 * 2**20
