"""Which rung of the caching phase fits, what options ask for, which changes make another cache entry."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import TinyFamily, built, img
from helpers.original_checkpoint import write_single_file
from torch import nn

from lora_trainer import families
from lora_trainer.config.schema import Config, DataConfig, MemoryConfig, ModelConfig
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Encoder, View
from lora_trainer.engine import attention
from lora_trainer.engine.attention import ChunkedProcessor, slice_where_unfused
from lora_trainer.planner.caching import Encoding, plan_caching
from lora_trainer.planner.encoders import load_encoders
from lora_trainer.planner.simulate import simulate_captions, simulate_images
from lora_trainer.seam.family import Family

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
STREAMING, QUANTIZATION, TILING = ((("memory", name)) for name in ("text_streaming", "text_quantization", "vae_tiling"))


# -- options


def test_auto_is_plain_and_whole():
    assert Encoding.of(MemoryConfig()) == Encoding()
    assert Encoding.of(MemoryConfig()).values() == {STREAMING: "no", QUANTIZATION: "no", TILING: "no"}


def test_what_is_written_is_fixed_and_a_presets_value_is_not():
    memory = MemoryConfig(text_quantization="nf4", text_streaming="yes", vae_tiling="no")
    fixed = ("text_streaming", "text_quantization", "vae_tiling")
    assert Encoding.of(memory) == Encoding(True, "nf4", preview_tiling="no", fixed=fixed)
    made = Encoding.of(memory, written={STREAMING})
    assert (made.fixed, made.text_quantization, made.preview_tiling) == (("text_streaming",), "nf4", "auto")


def test_a_resumed_run_goes_on_where_it_was_but_for_what_the_user_fixed_since():
    came_down = Encoding(text_streaming=True, text_on_cpu=True, vae_tiling=True, mixed=True, preview_tiling="yes")
    kept = Encoding.from_json(json.loads(json.dumps({**came_down.to_json(), "of another version": 1})))
    assert kept == came_down
    assert Encoding().resumed(kept) == came_down
    fixed = Encoding.of(MemoryConfig(vae_tiling="no")).resumed(kept)
    assert (fixed.vae_tiling, fixed.mixed, fixed.text_streaming, fixed.text_on_cpu) == (False, False, True, True)


# -- plans, at full size: the architectures that we ship, without any weight


@pytest.fixture(scope="module")
def shipped() -> Callable[[str], Family]:
    return lambda name: families.resolve(ModelConfig(family=name), DataConfig(), planning=True)


def test_sdxl_at_1024_goes_down_lossless_rungs_first(shipped):
    family, size = shipped("sdxl"), (1024, 1024)
    plain, streamed = simulate_captions(family, BF16), simulate_captions(family, BF16, streaming=True)
    whole, tiled = simulate_images(family, BF16, size), simulate_images(family, BF16, size, tiles=True)
    assert streamed.total < 0.25 * plain.total < plain.total
    assert streamed.host > 0.85 * (plain.total - streamed.total)
    assert tiled.total < 0.4 * whole.total
    rungs = [
        (whole.total, {STREAMING: "yes", QUANTIZATION: "no", TILING: "no"}, streamed, whole),
        (tiled.total, {STREAMING: "yes", QUANTIZATION: "no", TILING: "yes"}, streamed, tiled),
    ]
    for available, values, texts, images in rungs:
        encoding, phases, fits = plan_caching(family, Config(), BF16, size, available)
        assert encoding.values() == values
        assert fits
        assert phases["text_cache"] == texts
        assert phases["latent_cache"] == images


def test_quantised_captions_are_the_last_resort_of_the_card(shipped):
    family = shipped("sd15")
    rungs = [simulate_captions(family, BF16, quantization=kind, streaming=True).total for kind in ("no", "int8")]
    assert rungs[1] < rungs[0]
    for available, quantization in ((rungs[0], "no"), (rungs[0] - 1, "int8")):
        encoding, phases, fits = plan_caching(family, Config(), BF16, (512, 512), available)
        assert (encoding.text_streaming, encoding.text_quantization, fits) == (True, quantization, True)
        assert phases["text_cache"].total <= available


def test_what_is_written_stays_and_where_the_card_cannot_the_cpu_does(shipped):
    family, size = shipped("sd15"), (1024, 1024)
    config = Config(memory=MemoryConfig(text_streaming="no", text_quantization="no", vae_tiling="no"))
    written = frozenset({STREAMING, QUANTIZATION, TILING})
    encoding, phases, fits = plan_caching(family, config, BF16, size, 1 << 20, written)
    assert (encoding.text_on_cpu, encoding.images_on_cpu, fits) == (True, True, True)
    assert encoding.values() == {STREAMING: "no", QUANTIZATION: "no", TILING: "no"}
    assert {name: peak.total for name, peak in phases.items()} == {"text_cache": 0, "latent_cache": 0}
    assert phases["latent_cache"].host == simulate_images(family, BF16, size).total
    preset, _, _ = plan_caching(family, config, BF16, size, 1 << 29, frozenset())
    assert preset.vae_tiling


def test_tiles_are_not_tried_where_they_change_nothing(shipped):
    family = shipped("sd15")
    plain, _, fits = plan_caching(family, Config(), BF16, (512, 512), None)
    assert (plain, fits) == (Encoding(), True)
    encoding, _, _ = plan_caching(family, Config(), BF16, (512, 512), 1 << 28)
    assert (encoding.vae_tiling, encoding.images_on_cpu) == (False, True)


# -- keys


@pytest.fixture
def encoder_of(tmp_path: Path) -> Any:
    img(tmp_path / "ds/wide.png", 1200, 500)
    img(tmp_path / "ds/small.png", 500, 500)
    dataset = built(tmp_path / "ds", resolution=512)

    def made(**encoding: Any) -> Encoder:
        return Encoder(TinyFamily(), Cache(tmp_path), dataset.config, FP32, FP32, encoding=Encoding(**encoding))

    made.small, made.wide = sorted(dataset.examples, key=lambda item: max(item.fit.target))
    return made


def test_quantised_captions_have_keys_of_their_own_and_streamed_ones_have_not(encoder_of):
    plain = encoder_of().text_key("a")
    assert encoder_of(text_streaming=True, text_on_cpu=True).text_key("a") == plain
    assert len({plain, *(encoder_of(text_quantization=kind).text_key("a") for kind in ("int8", "nf4"))}) == 3


def test_tiled_images_have_keys_of_their_own_where_there_is_more_than_one_tile(encoder_of):
    whole, tiled = encoder_of(images_on_cpu=True), encoder_of(vae_tiling=True)
    assert max(encoder_of.wide.fit.target) > 512 >= max(encoder_of.small.fit.target)
    assert whole.image_key(encoder_of.wide, View()) != tiled.image_key(encoder_of.wide, View())
    assert whole.image_key(encoder_of.small, View()) == tiled.image_key(encoder_of.small, View())
    mixed = encoder_of(vae_tiling=True, mixed=True)
    assert mixed.image_keys(encoder_of.wide, View()) == [
        whole.image_key(encoder_of.wide, View()),
        tiled.image_key(encoder_of.wide, View()),
    ]
    assert len(mixed.image_keys(encoder_of.small, View())) == 1


# -- networks


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    def family(release: str) -> Family:
        path = tmp_path_factory.mktemp(release) / "base.safetensors"
        write_single_file(path, release)
        model = ModelConfig(base_model=str(path), tokenizer=str(path.parent / "words"), prediction_type="epsilon")
        return families.resolve(model, DataConfig())

    return family


LEAST_COSINE = {"no": 1 - 1e-6, "int8": 0.999, "nf4": 0.98}


@pytest.mark.parametrize("quantization", LEAST_COSINE)
@pytest.mark.parametrize("release", ["sd1", "sd2", "sdxl"])
def test_encoders_streamed_and_quantised(tiny_of, release, quantization):
    """Streaming changes no bit; a quantised encoder's embeds keep their direction."""
    family = tiny_of(release)
    plain = load_encoders(family, CPU, FP32)
    packed = load_encoders(family, CPU, FP32, quantization=quantization)
    streamed = load_encoders(family, CPU, FP32, quantization=quantization, streaming=True)
    for caption in ("a photo of a cat", "on red", ""):
        wanted, got, passed = (family.encode_text(e, [caption])[0] for e in (plain, packed, streamed))
        for name in wanted:
            assert torch.equal(passed[name], got[name])
            cosine = torch.cosine_similarity(wanted[name].flatten(), got[name].flatten(), dim=0)
            assert cosine > LEAST_COSINE[quantization]
            assert torch.equal(got[name], wanted[name]) is (quantization == "no")


@pytest.mark.parametrize("release", ["sd1", "sdxl"])
def test_attention_of_the_vae_is_sliced_only_where_nothing_fuses(tiny_of, monkeypatch, release):
    family = tiny_of(release)
    vae, other = family.load_vae(CPU, FP32), family.load_vae(CPU, FP32)
    assert slice_where_unfused(vae, CPU, FP32) == 0
    monkeypatch.setattr(attention, "fuses", lambda heads, size, device, dtype: size < 32)
    assert slice_where_unfused(vae, CPU, FP32) == 2
    assert sum(isinstance(getattr(layer, "processor", None), ChunkedProcessor) for layer in vae.modules()) == 2
    for layer in vae.modules():
        if isinstance(getattr(layer, "processor", None), ChunkedProcessor):
            layer.processor = ChunkedProcessor(score_bytes=1 << 10)
    pixels = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(vae.encode(pixels).latent_dist.mean, other.encode(pixels).latent_dist.mean, atol=1e-5)


def test_the_parts_that_were_loaded_are_told_as_they_are(tiny_of, tmp_path):
    from lora_trainer.data._work import load_text_encoders, load_vae

    dataset_config = DataConfig(data_dir=str(tmp_path))
    encoder = Encoder(
        tiny_of("sdxl"), Cache(tmp_path), dataset_config, FP32, BF16, encoding=Encoding(True, "int8")
    )  # fmt: skip
    load_text_encoders(encoder, CPU)
    load_vae(encoder, CPU)
    rows = {(row.component, row.dtype, row.device) for row in encoder.parts}
    for name in ("text_encoder", "text_encoder_2"):
        assert (name, "int8", "RAM → cpu") in rows
        assert any(c == name and dtype == "bf16" for c, dtype, _ in rows)
    assert ("vae", "fp32", "cpu") in rows
    weights = {name: sum(row.parameters for row in encoder.parts if row.component == name) for name, *_ in rows}
    plain: nn.ModuleDict = encoder.family.load_text_encoders(CPU, FP32)
    assert weights["text_encoder"] == sum(p.numel() for p in plain["text_encoder"].parameters())


