"""Memory that runs out while captions and images are encoded: real torch.OutOfMemoryErrors from a tracker's limit, real
networks, and the disguises in which libraries say the same. The cache ends full, with the bits of an undisturbed run."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_cases import built, good
from helpers.original_checkpoint import write_single_file

from lora_trainer import families
from lora_trainer.config.schema import DataConfig, MemoryConfig, ModelConfig
from lora_trainer.data.cache import Cache
from lora_trainer.data.dataset import Dataset
from lora_trainer.data.encode import EncodeCounts, Encoder, encode_dataset, image_entries
from lora_trainer.engine import vae_tiling
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import DoesNotFitError
from lora_trainer.planner.caching import Encoding, rung_title
from lora_trainer.planner.simulate import simulate_captions, simulate_images
from lora_trainer.seam.family import Family

CAPTIONS = ["a photo", "a photo of a cat", "red", ""]
CPU, FP32 = torch.device("cpu"), torch.float32


def deepen(configs: dict[str, dict[str, Any]]) -> None:
    """Encoders that are more layers than anything else, so that streaming is worth its while."""
    for name in ("text_encoder", "text_encoder_2"):
        if name in configs:
            configs[name] |= {"num_hidden_layers": 12, "intermediate_size": 512}


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    opened: dict[str, Family] = {}

    def family(release: str) -> Family:
        if release not in opened:
            path = tmp_path_factory.mktemp(release) / "base.safetensors"
            write_single_file(path, release, change=deepen)
            model = ModelConfig(base_model=str(path), tokenizer=str(path.parent / "words"))
            opened[release] = families.resolve(model, DataConfig())
        return opened[release]

    return family


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Four images of 128², which is four tiles."""
    return built(good(tmp_path_factory.mktemp("data") / "ds", 4), resolution=128, bucket_step=64)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_tiling, "TILE_PIXELS", 64)


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """Each rung collects garbage; what pytest and the libraries hold need not be gone through every time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Caching:
    """One caching phase under a limit of device bytes; remembers what it was told, and what was held then."""

    def __init__(
        self, family: Family, dataset: Dataset, folder: Path, encoding: Encoding | None = None, *, only: str = ""
    ) -> None:
        self.dataset = replace(dataset, examples=()) if only == "texts" else dataset
        self.captions = CAPTIONS if only == "texts" else []
        self.encoder = Encoder(family, Cache(folder), dataset.config, FP32, FP32, only != "images", encoding or Encoding())
        self.heard: list[tuple[str, str]] = []
        self.held: list[int] = []

    def run(self, limit: int | None = None) -> EncodeCounts:
        with MemoryTracker(limit=limit, record=False) as self.tracker:
            return encode_dataset(self.dataset, self.encoder, CPU, self.captions, on_oom=self._hear)

    def _hear(self, phase: str, rung: str) -> None:
        self.heard.append((phase, rung))
        self.held.append(self.tracker.now)
        assert rung_title(phase, rung).startswith("faltou memória (cache das ")

    def entries(self) -> dict[str, dict[str, torch.Tensor]]:
        folder, cache = self.encoder.cache.folder, self.encoder.cache
        return {path.stem: cache.read(path.stem) or {} for path in sorted(folder.rglob("*.safetensors"))}


def same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[key][name], other[key][name], atol=1e-6) for key in one for name in one[key]
    )


@pytest.mark.parametrize("release", ["sd1", "sdxl"])
def test_captions_come_down_to_streaming_and_then_to_the_cpu(family_of, dataset, tmp_path, release):
    """At limits that the simulation gives; and what it says of each rung is what the rung takes."""
    family = family_of(release)
    plain = simulate_captions(family, FP32).total
    streamed = simulate_captions(family, FP32, streaming=True).total
    assert streamed < 0.6 * plain
    straight = Caching(family, dataset, tmp_path / "straight", only="texts")
    straight.run()
    assert straight.tracker.peak == pytest.approx(plain, rel=0.02)
    lean = Caching(family, dataset, tmp_path / "lean", Encoding(text_streaming=True), only="texts")
    lean.run()
    assert lean.tracker.peak == pytest.approx(streamed, rel=0.02)
    for limit, rungs in (((plain + streamed) // 2, ["streamed"]), (streamed // 2, ["streamed", "cpu"])):
        run = Caching(family, dataset, tmp_path / str(limit), only="texts")
        assert run.run(limit).texts_made == len(CAPTIONS)
        assert run.heard == [("text_cache", rung) for rung in rungs]
        assert same(run.entries(), straight.entries())
        assert max(run.held) < 0.1 * plain, "the last rung is freed before the next is taken"


@pytest.mark.parametrize("release", ["sd1", "sdxl"])
def test_images_come_down_to_tiles_and_then_to_the_cpu(family_of, dataset, tmp_path, release):
    family, size = family_of(release), (128, 128)
    whole = simulate_images(family, FP32, size).total
    tiled = simulate_images(family, FP32, size, tiles=True).total
    assert tiled < 0.7 * whole
    straight = Caching(family, dataset, tmp_path / "whole", only="images")
    in_tiles = Caching(family, dataset, tmp_path / "tiles", Encoding(vae_tiling=True), only="images")
    for run, expected in ((straight, whole), (in_tiles, tiled)):
        run.run()
        assert run.tracker.peak == pytest.approx(expected, rel=0.02)
    assert not straight.entries().keys() & in_tiles.entries().keys()
    for limit, rungs, reference in (
        ((whole + tiled) // 2, ["tiled"], in_tiles),
        (tiled * 3 // 4, ["tiled", "cpu"], straight),
    ):
        run = Caching(family, dataset, tmp_path / str(limit), only="images")
        assert run.run(limit).images_made == 4
        assert run.heard == [("latent_cache", rung) for rung in rungs]
        assert same(run.entries(), reference.entries())
        assert max(run.held) < 0.1 * whole


def fail_on(family: Family, verb: str, calls: set[int], error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the calls with these numbers (from 1) of a family's verb fail; returns the list of all calls."""
    made: list[int] = []
    original = getattr(type(family), verb)

    def failing(self: Family, *args: Any) -> Any:
        made.append(len(made) + 1)
        if made[-1] in calls:
            raise error
        return original(self, *args)

    monkeypatch.setattr(type(family), verb, failing)
    return made


DISGUISES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
]


@pytest.mark.parametrize("error", DISGUISES, ids=lambda e: str(e)[:20])
def test_every_disguise_and_only_that_entry_again(family_of, dataset, tmp_path, monkeypatch, error):
    family = family_of("sd1")
    straight = Caching(family, dataset, tmp_path / "straight")
    straight.run()
    texts = fail_on(family, "encode_text", {3}, error, monkeypatch)
    images = fail_on(family, "encode_image", {2}, error, monkeypatch)
    run = Caching(family, dataset, tmp_path / "run")
    run.run()
    assert run.heard == [("text_cache", "streamed"), ("latent_cache", "tiled")]
    assert len(texts) == len(images) == 5, "four entries, one of them twice"
    assert len(run.entries()) == 8
    kept = run.entries().keys() & straight.entries().keys()
    assert len(kept) == 4 + 1, "one image was whole before memory ran out, and stays"
    assert all(run.encoder.read_image(i, v)["latents"].isfinite().all() for i, v in image_entries(dataset))


def test_other_errors_are_not_survived(family_of, dataset, tmp_path, monkeypatch):
    family = family_of("sd1")
    fail_on(family, "encode_text", {1}, RuntimeError("mat1 and mat2 shapes cannot be multiplied"), monkeypatch)
    run = Caching(family, dataset, tmp_path)
    with pytest.raises(RuntimeError, match="mat1"):
        run.run()
    assert run.heard == []


def test_a_mixed_cache_is_complete_for_the_resumed_run(family_of, dataset, tmp_path, monkeypatch):
    """Also after plano.json; and a fresh start without that memory finds the entries after one more out-of-memory."""
    family, error = family_of("sd1"), DISGUISES[0]
    with monkeypatch.context() as patch:
        fail_on(family, "encode_image", {2}, error, patch)
        first = Caching(family, dataset, tmp_path)
        first.run()
    kept = json.loads(json.dumps(asdict(first.encoder.encoding)))
    again = Caching(family, dataset, tmp_path, Encoding.of(MemoryConfig()).resumed(Encoding.from_json(kept)))
    counts = again.run()
    assert (counts.images_made, counts.texts_made, again.heard) == (0, 0, [])
    before = [first.encoder.read_image(i, v)["latents"] for i, v in image_entries(dataset)]
    after = [again.encoder.read_image(i, v)["latents"] for i, v in image_entries(dataset)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    with monkeypatch.context() as patch:
        calls = fail_on(family, "encode_image", {1}, error, patch)
        fresh = Caching(family, dataset, tmp_path)
        fresh.run()
        assert (len(calls), fresh.heard) == (2, [("latent_cache", "tiled")])
    assert len(fresh.entries()) == 8


FIXED = [
    ({"text_streaming": "no"}, ["cpu"], ["tiled"]),
    ({"text_streaming": "yes"}, ["cpu"], ["tiled"]),
    ({"vae_tiling": "no"}, ["streamed"], ["cpu"]),
    ({"vae_tiling": "yes"}, ["streamed"], ["cpu"]),
]


@pytest.mark.parametrize(("options", "texts", "images"), FIXED, ids=str)
def test_what_the_user_wrote_stays(family_of, dataset, tmp_path, monkeypatch, options, texts, images):
    family = family_of("sd1")
    fail_on(family, "encode_text", {1}, DISGUISES[0], monkeypatch)
    fail_on(family, "encode_image", {1}, DISGUISES[0], monkeypatch)
    asked = Encoding.of(MemoryConfig(**options))
    run = Caching(family, dataset, tmp_path, asked)
    run.run()
    assert run.heard == [*(("text_cache", r) for r in texts), *(("latent_cache", r) for r in images)]
    if "vae_tiling" in options:
        assert run.encoder.encoding.vae_tiling is asked.vae_tiling


@pytest.mark.parametrize(("verb", "phase", "way"), [
    ("encode_text", "cache das legendas", "quantizacao_texto=nf4"), ("encode_image", "cache das imagens", "vae_em_blocos"),
])  # fmt: skip
def test_below_the_last_rung_is_exit_3_and_keeps_what_is_done(family_of, dataset, tmp_path, monkeypatch, verb, phase, way):
    family = family_of("sd1")
    calls = fail_on(family, verb, {2, 3, 4}, DISGUISES[0], monkeypatch)
    run = Caching(family, dataset, tmp_path)
    with pytest.raises(DoesNotFitError, match=phase) as caught:
        run.run()
    assert caught.value.exit_code == 3
    assert way in caught.value.hint
    assert len(calls) == 4
    done = len(run.entries())
    assert done == (1 if verb == "encode_text" else 5)
    again = Caching(family, dataset, tmp_path)
    counts = again.run()
    assert counts.texts_made + counts.images_made == 8 - done
