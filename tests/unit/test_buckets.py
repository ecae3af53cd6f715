"""Buckets: the stated sizes of real reports, and what must hold for any image."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.data.buckets import BucketRule, cover, fit

SQUARE = BucketRule((512, 512))
sides = st.integers(1, 6000)


@pytest.mark.parametrize(
    ("size", "target"),
    [
        ((512, 512), (512, 512)),
        ((3072, 3000), (512, 512)),
        ((513, 511), (448, 448)),
        ((3000, 2000), (576, 384)),
        ((100, 4000), (64, 1024)),
        ((4000, 100), (1024, 64)),
    ],
)
def test_known_sizes(size, target):
    assert fit(size, SQUARE).target == target


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (63, 64)])
def test_too_small_for_any_bucket_unless_enlarged(size):
    assert fit(size, SQUARE) is None
    assert min(fit(size, BucketRule((512, 512), upscale=True)).target) >= 64


def test_small_images_are_enlarged_only_when_asked():
    assert fit((300, 300), SQUARE).target == (256, 256)
    assert fit((300, 300), BucketRule((512, 512), upscale=True)).target == (512, 512)


def test_without_buckets_everything_has_the_resolution():
    rule = BucketRule((520, 768), enabled=False)
    assert fit((2000, 1000), rule).target == (512, 768)
    assert fit((400, 1000), rule) is None
    assert fit((400, 1000), BucketRule((520, 768), enabled=False, upscale=True)).target == (512, 768)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.sampled_from([(512, 512), (1024, 1024), (512, 768)]), st.sampled_from([8, 64]), st.booleans())
def test_every_fit_obeys_the_rule(width, height, resolution, step, upscale):
    found = fit((width, height), BucketRule(resolution, step, upscale))
    if found is None:
        assert not upscale
        assert min(width, height) < step
        return
    (w, h), (rw, rh) = found.target, found.resized
    assert w % step == 0
    assert h % step == 0
    assert 0 < w * h <= resolution[0] * resolution[1]
    assert rw >= w
    assert rh >= h
    assert 0 <= found.cropped < 1
    assert upscale or (w <= width and h <= height)
    assert rw == w or rh == h, "scaled no further than needed"


@settings(max_examples=100, deadline=None)
@given(st.integers(512, 6000), st.floats(0.4, 2.5))
def test_ordinary_shapes_lose_little(width, ratio):
    found = fit((width * 2, int(width * 2 * ratio)), SQUARE)
    assert found.cropped < 0.2
    assert found.target[0] * found.target[1] > 0.65 * 512 * 512


@given(st.integers(64, 3000), st.integers(64, 3000), st.floats(0, 1), st.floats(0, 1))
def test_the_crop_stays_inside_and_mirrors_its_offset(width, height, x, y):
    found = cover((width, height), (64, 64))
    left, top, right, bottom = found.box((x, y))
    assert 0 <= left < right <= 1 + 1e-9
    assert 0 <= top < bottom <= 1 + 1e-9
    plain, mirrored = found.framing((x, y)), found.framing((x, y), flip=True)
    assert plain.crop[0] + mirrored.crop[0] == found.slack[0]
    assert plain.crop[1] == mirrored.crop[1]
    assert plain.original == (width, height)
