"""The store of encoded examples and the phase that fills it. H05's cached captions; killed and damaged caches."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from data_cases import TinyFamily, built, cap, good, img

from lora_trainer.data.cache import Cache, cache_key
from lora_trainer.data.encode import Encoder, View, caches_text, encode_dataset, image_entries, text_entries, views
from lora_trainer.errors import ConfigError, DataError

CPU = torch.device("cpu")


def encoder(dataset, folder: Path, **options) -> Encoder:
    return Encoder(TinyFamily(), Cache(folder), dataset.config, torch.float32, torch.float32, **options)


def encoded(data_dir: Path, folder: Path, **options):
    """(dataset, encoder, counts) after the caching phase."""
    dataset = built(data_dir, resolution=64, bucket_step=64, **options)
    made = encoder(dataset, folder)
    return dataset, made, encode_dataset(dataset, made, CPU)


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


# -- the store


def test_round_trip_and_absence(tmp_path):
    cache = Cache(tmp_path / "new")
    key = cache_key("image", 1, ("a", 2))
    assert not cache.has(key)
    assert cache.read(key) is None
    example = {"latents": torch.randn(4, 2, 2), "n": torch.tensor(3), "half": torch.ones(2, dtype=torch.bfloat16)}
    cache.write(key, example)
    assert cache.has(key)
    read = cache.read(key)
    assert read.keys() == example.keys()
    assert all(torch.equal(read[name], example[name]) for name in example)
    assert [p.name for p in (tmp_path / "new").rglob("*") if p.is_file()] == [f"{key}.safetensors"]


def test_views_of_one_tensor_are_stored_apart(tmp_path):
    whole = torch.arange(4.0)
    Cache(tmp_path).write("ab", {"a": whole, "b": whole[:2], "c": whole.flip(0)})
    assert Cache(tmp_path).read("ab")["c"].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b[:4], lambda b: b"", lambda b: b"\xff" * len(b)])
def test_a_damaged_entry_counts_as_missing(tmp_path, spoil):
    cache = Cache(tmp_path)
    cache.write("ab", {"a": torch.ones(100)})
    cache.path("ab").write_bytes(spoil(cache.path("ab").read_bytes()))
    assert not cache.has("ab")
    assert cache.read("ab") is None


def test_an_unwritable_folder_is_the_users_error_and_leaves_nothing(tmp_path):
    (tmp_path / "ab").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="diretorio_cache"):
        Cache(tmp_path).write("ab", {"a": torch.ones(1)})
    assert [p.name for p in tmp_path.iterdir()] == ["ab"]


# -- the phase


def test_second_phase_loads_no_network(tmp_path):
    ds = good(tmp_path / "ds", 3)
    _, first, counts = encoded(ds, tmp_path / "store")
    assert first.family.loaded == ["text", "vae"]
    assert (counts.images, counts.images_made, counts.texts, counts.texts_made) == (3, 3, 3, 3)
    _, second, counts = encoded(ds, tmp_path / "store")
    assert second.family.loaded == []
    assert (counts.images_made, counts.texts_made) == (0, 0)


def test_only_what_is_missing_is_made(tmp_path):
    ds = good(tmp_path / "ds", 3)
    encoded(ds, tmp_path / "store")
    cap(ds / "ok1.txt", "outra legenda")
    _, made, counts = encoded(ds, tmp_path / "store")
    assert made.family.loaded == ["text"]
    assert counts.texts_made == 1
    img(ds / "ok9.png")
    cap(ds / "ok9.txt", "outra legenda")
    _, made, counts = encoded(ds, tmp_path / "store")
    assert made.family.loaded == ["vae"]
    assert counts.images_made == 1


def test_an_interrupted_phase_ends_with_the_same_bits(tmp_path):
    ds = good(tmp_path / "ds", 4)
    encoded(ds, tmp_path / "straight")

    class Stop(Exception):
        pass

    def stop(phase: str, done: int, total: int) -> None:
        if (phase, done) == ("images", 2):
            raise Stop

    dataset = built(ds, resolution=64)
    with pytest.raises(Stop):
        encode_dataset(dataset, encoder(dataset, tmp_path / "resumed"), CPU, progress=stop)
    assert 0 < len(entries(tmp_path / "resumed")) < len(entries(tmp_path / "straight"))
    damaged = next((tmp_path / "resumed").rglob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    encoded(ds, tmp_path / "resumed")
    assert entries(tmp_path / "resumed") == entries(tmp_path / "straight")


def test_two_runs_at_once_fill_one_cache(tmp_path):
    ds = good(tmp_path / "ds", 4)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: encoded(ds, tmp_path / "store"), range(2)))
    assert len(entries(tmp_path / "store")) == 8
    dataset, one, _ = both[0]
    assert all(one.cache.has(one.image_key(item, View())) for item in dataset.examples)
    assert not list((tmp_path / "store").rglob("*.tmp"))


@pytest.mark.parametrize(
    "change",
    [{"background": "black"}, {"resolution": 128}, {"mask": "alpha"}, {"flip": True}, {"crop": "random"}],
)
def test_whatever_changes_the_encoding_changes_the_key(tmp_path, change):
    img(tmp_path / "ds/a.png", 300, 200)
    before = built(tmp_path / "ds", resolution=64)
    after = built(tmp_path / "ds", **{"resolution": 64, **change})
    made = encoder(before, tmp_path), encoder(after, tmp_path)
    keys = [{e.image_key(i, v) for i, v in image_entries(d)} for d, e in zip((before, after), made, strict=True)]
    assert keys[1] - keys[0]
    half = Encoder(TinyFamily(), Cache(tmp_path), before.config, torch.float16, torch.float16)
    assert half.image_key(before.examples[0], View()) not in keys[0]
    assert half.text_key("a") != made[0].text_key("a")


def test_an_entry_holds_what_the_image_shows(tmp_path):
    img(tmp_path / "ds/a.png", 300, 200)
    dataset, made, _ = encoded(tmp_path / "ds", tmp_path / "store", flip=True, upscale=True)
    item = dataset.examples[0]
    straight, mirrored = (made.read_image(item, view) for view in views(item, dataset.config))
    pixels, _ = made.pixels(item, View())
    vae = made.family.load_vae(CPU, torch.float32)
    with torch.no_grad():
        assert torch.equal(straight["latents"], vae.encode(pixels).latent_dist.mean[0])
        assert torch.equal(mirrored["latents"], vae.encode(pixels.flip(-1)).latent_dist.mean[0])
    assert straight["time_ids"].tolist() == [300, 200, 16, 0, 64, 64]


def test_random_crops_are_different_places(tmp_path):
    img(tmp_path / "ds/a.png", 300, 200)
    dataset, made, counts = encoded(tmp_path / "ds", tmp_path / "store", crop="random", crop_variants=3)
    item = dataset.examples[0]
    assert counts.images == 3
    assert len({made.read_image(item, view)["time_ids"][2].item() for view in views(item, dataset.config)}) > 1
    img(tmp_path / "quadrada/a.png", 64, 64)
    square = built(tmp_path / "quadrada", resolution=64, crop="random")
    assert len(image_entries(square)) == 1, "nothing to choose from"


def test_cached_captions_hold_every_variant_and_the_empty_one(tmp_path):
    img(tmp_path / "ds/a.png")
    cap(tmp_path / "ds/a.txt", "a, b, c, d")
    options = {"shuffle_captions": True, "caption_variants": 4, "caption_dropout": 0.1}
    dataset, made, counts = encoded(tmp_path / "ds", tmp_path / "store", **options)
    assert counts.texts == len(text_entries(dataset)) == 5
    assert made.read_text("")["prompt_embeds"].shape == (77, 16)


def test_preview_prompts_are_kept_too(tmp_path):
    dataset = built(good(tmp_path / "ds", 1), resolution=64)
    made = encoder(dataset, tmp_path / "store", cache_text=False)
    counts = encode_dataset(dataset, made, CPU, extra_captions=["uma praia", ""])
    assert counts.texts == 2
    assert made.read_text("uma praia")["prompt_embeds"].isfinite().all()
    with pytest.raises(DataError, match="rode de novo"):
        made.read_text("outra")


def test_masks_are_averaged_to_latent_size(tmp_path):
    from PIL import Image

    image = Image.new("RGBA", (64, 64), (255, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 36, 64))
    (tmp_path / "ds").mkdir()
    image.save(tmp_path / "ds/a.png")
    dataset, made, _ = encoded(tmp_path / "ds", tmp_path / "store", mask="alpha", flip=True)
    straight, mirrored = (made.read_image(dataset.examples[0], v) for v in views(dataset.examples[0], dataset.config))
    assert straight["mask"].shape == (1, 8, 8)
    assert straight["mask"][0, 3].tolist() == [0, 0, 0, 0, 0.5, 1, 1, 1]
    assert torch.equal(mirrored["mask"], straight["mask"].flip(-1))


def test_text_cache_and_text_training_exclude_each_other():
    assert caches_text("auto", False)
    assert not caches_text("auto", True)
    assert not caches_text("no", False)
    with pytest.raises(ConfigError, match=r"cache_codificador_texto.*treinar_codificador_texto"):
        caches_text("yes", True)


def test_a_file_changed_since_the_check_is_named(tmp_path):
    dataset = built(good(tmp_path / "ds", 2), resolution=64)
    (tmp_path / "ds/ok1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"ok1\.png"):
        encode_dataset(dataset, encoder(dataset, tmp_path / "store"), CPU)
