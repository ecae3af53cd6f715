"""How captions change from draw to draw. Case B08 of the bug reports; H05's cached variants."""

from collections import Counter

import pytest
from data_cases import config

from lora_trainer.data.variants import all_variants, drawn, plain, stable_hash, variant

TAGS = "ohwx gato; olhos azuis, claros; sentado; na praia"


@pytest.fixture
def options(tmp_path):
    return lambda **chosen: config(tmp_path, **chosen)


def test_same_separator_inner_commas_first_tag_fixed_nothing_lost(options):
    chosen = options(shuffle_captions=True, separator=";", keep_tags=1)
    seen = {variant(TAGS, chosen, 1, draw, "x") for draw in range(200)}
    assert len(seen) == 6
    for text in seen:
        assert text.startswith("ohwx gato; ")
        assert Counter(text.split("; ")) == Counter(TAGS.split("; "))


def test_empty_tags_disappear(options):
    for draw in range(20):
        text = variant("a,,b, ,c,", options(shuffle_captions=True), 0, draw, "x")
        assert sorted(text.split(", ")) == ["a", "b", "c"]


def test_keep_separator_is_obeyed_and_removed(options):
    chosen = options(shuffle_captions=True, keep_separator="|||")
    seen = {variant("1girl, x ||| y, z", chosen, 0, draw, "u") for draw in range(50)}
    assert seen == {"1girl, x, y, z", "1girl, x, z, y"}
    assert plain("1girl, x ||| y, z", chosen) == "1girl, x, y, z"


def test_without_shuffle_a_sentence_is_left_alone(options):
    text = "Uma foto, à noite,,  de um gato."
    assert variant(text, options(), 0, 5, "x") == text


def test_trigger_never_moves_or_drops(options):
    chosen = options(shuffle_captions=True, tag_dropout=0.9, trigger="ohwx")
    seen = {variant("ohwx, a, b, c", chosen, 0, draw, "x") for draw in range(100)}
    assert all(text.startswith("ohwx") for text in seen)
    assert "ohwx" in seen


def test_tag_dropout_drops_at_its_rate(options):
    chosen = options(tag_dropout=0.25, keep_tags=1)
    counts = [len(variant("k, a, b, c, d", chosen, 0, draw, "x").split(", ")) - 1 for draw in range(1000)]
    assert abs(sum(counts) / 4000 - 0.75) < 0.03


def test_deterministic_by_seed_draw_and_image(options):
    chosen = options(shuffle_captions=True)
    text = ", ".join("abcdefgh")
    again = [variant(text, chosen, 1, 2, "x") for _ in range(2)]
    assert again[0] == again[1]
    assert (
        len(
            {
                again[0],
                variant(text, chosen, 2, 2, "x"),
                variant(text, chosen, 1, 3, "x"),
                variant(text, chosen, 1, 2, "y"),
            }
        )
        == 4
    )


def test_hash_is_pinned():
    """Draws of a resumed run must not change with a new version."""
    assert stable_hash("order", 1, 2, "uid", 0) == 11416412688106817012


@pytest.mark.parametrize("choice", [
    {"shuffle_captions": True}, {"tag_dropout": 0.3}, {"caption_dropout": 0.5},
    {"shuffle_captions": True, "tag_dropout": 0.3, "caption_dropout": 0.2, "caption_variants": 3},
])  # fmt: skip
def test_cached_variants_cover_every_draw_of_every_seed(options, choice):
    chosen = options(**choice)
    captions = ("a, b, c, d", "e, f, g")
    held = set(all_variants(captions, chosen, "x"))
    seen = {drawn(captions, chosen, seed, draw, "x", cached=True) for seed in range(5) for draw in range(60)}
    assert seen == held
    assert len(held) <= 2 * chosen.caption_variants + 1


def test_caption_dropout_rate_is_per_draw_even_when_cached(options):
    chosen = options(caption_dropout=0.1)
    empty = sum(drawn(("a",), chosen, 7, draw, "x", cached=True) == "" for draw in range(3000))
    assert abs(empty / 3000 - 0.1) < 0.02


def test_uncached_draws_are_not_limited(options):
    chosen = options(shuffle_captions=True, caption_variants=2)
    text = (", ".join("abcdefgh"),)
    assert len({drawn(text, chosen, 0, draw, "x", cached=False) for draw in range(50)}) > 40
