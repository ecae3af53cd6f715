"""Folders as users have them. Cases A01, A04, A05, A06, A09, A11, A12, A13 of the bug reports."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from data_cases import built, cap, captions, config, good, img, left_out, names
from PIL import Image

from lora_trainer.config.schema import DataConfig
from lora_trainer.data.batches import BatchPlan
from lora_trainer.data.dataset import build
from lora_trainer.data.report import summary_lines
from lora_trainer.data.walk import walk
from lora_trainer.errors import ConfigError, DataError, set_language


def repeats(dataset):
    return {item.name: item.repeats for item in dataset.examples}


# -- A01: which folder


def test_kohya_parent_and_a_folder_without_number(tmp_path):
    good(tmp_path / "ds/10_ohwx gato")
    good(tmp_path / "ds/CROP", 2)
    img(tmp_path / "ds/10_ohwx gato/sem.png")
    dataset = built(tmp_path / "ds")
    ten = [f"10_ohwx gato/{name}.png" for name in ("ok0", "ok1", "ok2", "ok3", "sem")]
    assert repeats(dataset) == {**dict.fromkeys(ten, 10), "CROP/ok0.png": 1, "CROP/ok1.png": 1}
    assert captions(dataset)["10_ohwx gato/sem.png"] == "ohwx gato"
    assert captions(dataset)["10_ohwx gato/ok0.png"] == "foto de ohwx gato 0"


def test_the_kohya_folder_itself_and_a_plain_one(tmp_path):
    good(tmp_path / "ds/10_ohwx gato")
    good(tmp_path / "plano", 3)
    assert set(repeats(built(tmp_path / "ds/10_ohwx gato")).values()) == {10}
    assert repeats(built(tmp_path / "plano")) == {f"ok{i}.png": 1 for i in range(3)}
    assert set(repeats(built(tmp_path / "ds", repeats=3)).values()) == {3}


def test_a_year_is_not_a_repeat_count(tmp_path):
    assert set(repeats(built(good(tmp_path / "2024_fotos"))).values()) == {1}


def test_no_images_at_all(tmp_path):
    (tmp_path / "vazio").mkdir()
    with pytest.raises(DataError, match=r"nenhuma imagem em .*vazio") as caught:
        built(tmp_path / "vazio")
    assert ".jpg" in caught.value.hint
    with pytest.raises(DataError, match="não existe"):
        built(tmp_path / "ausente")
    with pytest.raises(DataError, match="é um arquivo"):
        built(img(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match="diretorio_dados"):
        build(DataConfig(), tmp_path / "cache")


def test_not_recursive_says_what_it_passed_over(tmp_path):
    good(tmp_path / "ds/sub")
    with pytest.raises(DataError) as caught:
        built(tmp_path / "ds", recursive=False)
    assert "recursivo: sim" in caught.value.hint
    good(tmp_path / "ds", 1)
    assert names(built(tmp_path / "ds", recursive=False)) == ["ok0.png"]


# -- A04: bad images


def spoil(ds: Path) -> Path:
    good(ds)
    data = img(ds / "trunc.jpg", 512, 512).read_bytes()
    (ds / "trunc.jpg").write_bytes(data[: len(data) // 2])
    (ds / "zero.png").write_bytes(b"")
    (ds / "html.jpg").write_text("<html>404</html>")
    img(ds / "x.jpg").rename(ds / "fake.png")
    (ds / "quebrado.png").symlink_to(ds / "nada.png")
    return ds


def test_all_bad_images_are_listed_at_once(tmp_path):
    with pytest.raises(DataError) as caught:
        built(spoil(tmp_path / "ds"))
    text = str(caught.value)
    assert "4 arquivos ruins" in text
    assert all(name in text for name in ("trunc.jpg: ", "zero.png: ", "html.jpg: ", "quebrado.png: atalho quebrado"))
    assert "fake.png" not in text
    assert "imagens_ruins: pular" in text


def test_bad_images_can_be_skipped_and_are_counted(tmp_path):
    dataset = built(spoil(tmp_path / "ds"), bad_images="skip")
    assert names(dataset) == ["fake.png", *(f"ok{i}.png" for i in range(4))]
    assert sorted(left_out(dataset)) == ["html.jpg", "quebrado.png", "trunc.jpg", "zero.png"]


def test_problems_of_every_kind_come_together(tmp_path):
    ds = spoil(tmp_path / "ds")
    cap(ds / "metadata.jsonl", "{")
    with pytest.raises(DataError) as caught:
        built(ds, uncaptioned="stop")
    assert all(
        part in str(caught.value) for part in ("4 arquivos ruins", "metadata.jsonl:1", "1 de 5 sem legenda: fake.png")
    )


# -- A05: suffixes


def test_suffixes_in_any_case(tmp_path):
    ds = tmp_path / "ds"
    for name in ["IMG_1.JPG", "IMG_2.Jpeg", "c.PNG", "d.WebP", "e.bmp", "f.TIFF"]:
        img(ds / name)
        cap(ds / (name.rsplit(".", 1)[0] + ".txt"), "ohwx")
    img(ds / "g.png")
    cap(ds / "g.TXT", "maiuscula")
    (ds / "h.heic").write_bytes(bytes(64))
    (ds / "i.avif").write_bytes(bytes(64))
    dataset = built(ds, bad_images="skip")
    assert len(names(dataset)) == 7
    assert captions(dataset)["g.png"] == "maiuscula"
    with pytest.raises(DataError, match=r"h\.heic: (?s:.*)i\.avif: "):
        built(ds)
    found = walk(ds, suffixes=frozenset({".png"}))
    assert found.unsupported == ["h.heic", "i.avif"]


def test_unsupported_types_are_one_line(tmp_path):
    ds = good(tmp_path / "ds")
    for name in ("a.jxl", "b.CR2"):
        (ds / name).write_bytes(b"x")
    assert [w for w in built(ds).notes.warnings if "a.jxl" in w] == ["2 arquivos de tipo não lido: a.jxl, b.CR2"]


def test_heic_and_avif_are_read(tmp_path):
    pillow_heif = pytest.importorskip("pillow_heif")
    image = Image.open(img(tmp_path / "x.png", 320, 256))
    (tmp_path / "ds").mkdir()
    pillow_heif.from_pillow(image).save(tmp_path / "ds/foto.HEIC")
    image.save(tmp_path / "ds/a.avif")
    assert {item.name: item.facts.size for item in built(tmp_path / "ds").examples} == {
        "a.avif": (320, 256), "foto.HEIC": (320, 256),
    }  # fmt: skip


# -- A11: junk


def test_junk_is_passed_over_on_both_runs(tmp_path):
    ds = good(tmp_path / "ds")
    img(ds / ".ipynb_checkpoints/ok0-checkpoint.png")
    for name in ["._ok0.png", ".DS_Store", "Thumbs.db", "desktop.ini", "ok0.npz", "ok0_mask.npz"]:
        (ds / name).write_bytes(b"\0\5\26\7" * 20)
    img(ds / "__MACOSX/._ok1.png")
    (ds / "pasta.png").mkdir()
    img(ds / "ok0-masklabel.png")
    for _ in range(2):
        dataset = build(config(ds), ds / "cache", exclude=[ds / "saida"])
        assert names(dataset) == [f"ok{i}.png" for i in range(4)]
        assert not dataset.notes.warnings
        img(ds / "saida/run/amostras/grade.png")


# -- A12: folders and links


def test_subfolders_links_and_a_loop(tmp_path):
    ds = tmp_path / "ds"
    img(ds / "a/b/fundo.png")
    cap(ds / "a/b/fundo.txt", "fundo")
    img(tmp_path / "fora/l.png")
    (ds / "link").symlink_to(tmp_path / "fora")
    (ds / "loop").symlink_to(ds)
    (ds / "a/copia").symlink_to(ds / "a/b")
    assert names(built(ds)) == ["a/b/fundo.png", "link/l.png"]
    assert captions(built(ds))["a/b/fundo.png"] == "fundo"


def test_animations_and_profiles_are_told(tmp_path):
    frames = [Image.new("RGB", (64, 64), (i * 80, 0, 0)) for i in range(3)]
    ds = good(tmp_path / "ds")
    frames[0].save(ds / "x.webp", save_all=True, append_images=frames[1:])
    frames[0].save(ds / "y.png", icc_profile=b"nonsense")
    told = "\n".join(built(ds).notes.warnings)
    assert "primeiro quadro da animação conta: x.webp" in told
    assert "perfil de cor inválido, ignorado: y.png" in told


# -- A13: tiny and extreme


def test_tiny_and_extreme_images(tmp_path):
    ds = tmp_path / "ds"
    for w, h in [(1, 1), (16, 16), (63, 64), (100, 4000), (4000, 100), (512, 512), (513, 511), (3072, 3000)]:
        img(ds / f"{w}x{h}.png", w, h)
    dataset = built(ds)
    targets = {item.name: item.fit.target for item in dataset.examples}
    assert targets == {
        "100x4000.png": (64, 1024), "4000x100.png": (1024, 64), "512x512.png": (512, 512),
        "513x511.png": (448, 448), "3072x3000.png": (512, 512),
    }  # fmt: skip
    assert left_out(dataset) == ["16x16.png (16x16)", "1x1.png (1x1)", "63x64.png (63x64)"]
    assert any("mais de 30%" in w and "100x4000.png (60%)" in w for w in dataset.notes.warnings)
    enlarged = built(ds, upscale=True, min_side=1)
    assert len(enlarged.examples) == 8
    assert {item.name: item.fit.target for item in enlarged.examples}["1x1.png"] == (512, 512)


def test_nothing_usable_is_an_error_with_reasons(tmp_path):
    img(tmp_path / "ds/a.png", 32, 32)
    with pytest.raises(DataError, match=r"nenhuma imagem pode ser usada.*a\.png"):
        built(tmp_path / "ds")


def test_bucket_step_follows_the_model(tmp_path):
    dataset = build(config(good(tmp_path / "ds"), bucket_step=8), tmp_path / "cache", side_multiple=64)
    assert dataset.rule.step == 64
    assert any("64" in note for note in dataset.notes.notes)
    with pytest.raises(ConfigError, match="64x64"):
        build(config(tmp_path / "ds", resolution=64, bucket_step=128), tmp_path / "cache")


# -- A09: limits


def test_too_many_pixels_by_name_also_from_the_index(tmp_path):
    ds = good(tmp_path / "ds")
    assert len(names(built(ds))) == 4
    with pytest.raises(DataError, match=r"ok0\.png: 65\.536 pixels; o limite é 60\.000"):
        built(ds, max_pixels=60_000)


# -- the index


def test_second_start_opens_no_image(tmp_path):
    ds = good(tmp_path / "ds")
    first = built(ds)
    for path in ds.glob("*.png"):  # what is in the files now cannot be decoded, but size and time are the same
        stat = path.stat()
        path.write_bytes(b"x" * stat.st_size)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert built(ds).fingerprint() == first.fingerprint()
    path = ds / "ok0.png"
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=r"1 arquivo ruim(?s:.*)ok0\.png"):
        built(ds)


def test_a_damaged_index_is_made_again(tmp_path):
    ds = good(tmp_path / "ds")
    built(ds)
    (tmp_path / "cache/index.sqlite3").write_bytes(b"garbage" * 1000)
    assert len(built(ds).examples) == 4


def test_two_scans_at_once(tmp_path):
    ds = good(tmp_path / "ds", 30)
    with ThreadPoolExecutor(3) as pool:
        prints = set(pool.map(lambda _: built(ds).fingerprint(), range(3)))
    assert len(prints) == 1
    with sqlite3.connect(tmp_path / "cache/index.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM files_1").fetchone() == (30,)


def test_moving_the_folder_changes_nothing(tmp_path):
    first = built(good(tmp_path / "ds"))
    shutil.move(tmp_path / "ds", tmp_path / "outra")
    assert [i.uid for i in built(tmp_path / "outra").examples] == [i.uid for i in first.examples]


# -- masks, validation, regularization


def test_masks_beside_and_in_a_folder(tmp_path):
    ds = good(tmp_path / "ds", 3)
    img(ds / "ok0-masklabel.png", 128, 128)
    beside = {i.name: i.mask.path.name if i.mask else None for i in built(ds, mask="files").examples}
    assert beside == {"ok0.png": "ok0-masklabel.png", "ok1.png": None, "ok2.png": None}
    img(tmp_path / "mascaras/ok1.JPG")
    dataset = built(ds, mask="files", mask_dir=str(tmp_path / "mascaras"))
    assert {i.name: i.mask.path.name if i.mask else None for i in dataset.examples}["ok1.png"] == "ok1.JPG"
    assert "sem máscara, valem por inteiro: ok0.png, ok2.png (2)" in dataset.notes.warnings
    assert "sem máscara, valem por inteiro: ok0.png, ok1.png, ok2.png (3)" in built(ds, mask="alpha").notes.warnings
    img(ds / "ok2-masklabel.png", 128, 64)
    with pytest.raises(DataError, match=r"máscara de 128x64 para imagem de 256x256"):
        built(ds, mask="files")


def test_validation_split_goes_by_content(tmp_path):
    ds = good(tmp_path / "ds", 10)
    for i in range(10):
        shutil.copy(ds / f"ok{i}.png", ds / f"z_copia{i}.png")
    dataset = built(ds, validation_fraction=0.2)
    held = {item.facts.content for item in dataset.validation}
    assert len(held) == 2
    assert len(dataset.validation) == 4
    assert held.isdisjoint(item.facts.content for item in dataset.examples)
    assert built(ds, validation_fraction=0.2).validation == dataset.validation


@pytest.mark.parametrize(("count", "expected"), [(2, {3}), (3, {2}), (4, {1, 2}), (9, {1})])
def test_regularization_matches_the_training_images(tmp_path, count, expected):
    good(tmp_path / "ds/2_x", 3)
    for i in range(count):
        img(tmp_path / f"reg/1_gato/r{i}.png")
    dataset = built(tmp_path / "ds", regularization_dir=str(tmp_path / "reg"), trigger="ohwx")
    assert sum(item.repeats for item in dataset.regularization) == sum(item.repeats for item in dataset.training) == 6
    assert {item.repeats for item in dataset.regularization} == expected
    assert {item.caption.texts for item in dataset.regularization} == {("gato",)}
    assert len(left_out(dataset)) == max(0, count - 6)


# -- folders that must not be read, or that hold each other


def run_folder(path, *marks):
    for mark in marks or ("metricas.jsonl", "estado/execucao.json"):
        (path / mark).parent.mkdir(parents=True, exist_ok=True)
        (path / mark).touch()
    img(path / "amostras/passo000100.png")


@pytest.mark.parametrize(
    ("place", "marks"),
    [
        ("saida/gato", ()),
        ("a/b/gato", ("metricas.jsonl", "estado/passo-000001/x")),
        ("gato", ("estado/execucao.json",)),
        ("gato.antigo-12", ("config.yaml",)),
    ],
)
def test_previews_of_old_runs_are_no_training_images(tmp_path, place, marks):
    ds = good(tmp_path / "ds", 2)
    run_folder(ds / place, *marks)
    dataset = built(ds)
    assert names(dataset) == ["ok0.png", "ok1.png"]
    assert [line for line in dataset.notes.warnings if "execuções" in line and place in line]


def test_a_folder_that_only_resembles_a_run_is_read(tmp_path):
    ds = good(tmp_path / "ds", 1)
    img(ds / "estado/a.png")
    img(ds / "casa.antigo/b.png")
    cap(ds / "metricas.jsonl", "")
    assert names(built(ds)) == ["casa.antigo/b.png", "estado/a.png", "ok0.png"]


def test_only_old_runs_is_said(tmp_path):
    run_folder(tmp_path / "ds/gato")
    with pytest.raises(DataError) as caught:
        built(tmp_path / "ds")
    assert "execuções não são lidas: gato" in caught.value.hint


@pytest.mark.skipif(os.name == "nt", reason="file names are bytes elsewhere only")
def test_names_that_are_not_utf8(tmp_path):
    ds = good(tmp_path / "ds", 1)
    folder = ds / os.fsdecode("10_avó".encode("latin-1"))
    img(folder / "x.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    (folder / os.fsdecode(b"ru\xeddo.jpg")).write_bytes(b"nada")
    dataset = built(ds, bad_images="skip", validation_fraction=0.5)
    items = [*dataset.examples, *dataset.validation]
    assert {item.name for item in items} == {"ok0.png", "10_av\\xf3/caf\\xe9.png"}
    assert {item.caption.texts[0] for item in items} == {"foto de ohwx gato 0", "avó"}
    assert len({item.uid for item in items}) == 2
    assert left_out(dataset) == ["10_av\\xf3/ru\\xeddo.jpg"]
    told = [*dataset.notes.warnings, *dataset.notes.notes, *summary_lines(BatchPlan(dataset, 1, 1, 0), 1)]
    "\n".join(told).encode("utf-8")
    assert built(ds, bad_images="skip", validation_fraction=0.5).fingerprint() == dataset.fingerprint()
    with pytest.raises(DataError) as caught:
        built(ds)
    str(caught.value).encode("utf-8")
    assert "ru\\xeddo.jpg" in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="file names are bytes elsewhere only")
def test_a_data_folder_whose_own_name_is_not_utf8(tmp_path):
    ds = tmp_path / os.fsdecode(b"ma\xe7as")
    with pytest.raises(DataError) as caught:
        built(ds)
    str(caught.value).encode("utf-8")
    ds.mkdir()
    with pytest.raises(DataError) as caught:
        built(ds)
    str(caught.value).encode("utf-8")
    assert names(built(good(ds, 2))) == ["ok0.png", "ok1.png"]


def test_a_number_too_large_for_repeats_is_said_a_year_is_not(tmp_path):
    good(tmp_path / "ds/99999_muito", 1)
    good(tmp_path / "ds/2024_ferias", 1)
    good(tmp_path / "ds/20240131_praia", 1)
    dataset = built(tmp_path / "ds")
    assert set(repeats(dataset).values()) == {1}
    assert [line for line in dataset.notes.warnings if "grande demais" in line] == [
        "pasta 99999_muito: 99999 é grande demais para um número de repetições e não conta como tal"
    ]
    assert not built(tmp_path / "ds", repeats=2).notes.warnings


def test_a_validation_share_that_holds_out_nothing_is_said(tmp_path):
    ds = good(tmp_path / "ds", 1)
    shutil.copy(ds / "ok0.png", ds / "copia.png")
    dataset = built(ds, validation_fraction=0.3)
    assert not dataset.validation
    assert any("fracao_validacao: 0.3, mas nada ficou fora" in line for line in dataset.notes.warnings)
    assert not [w for w in built(good(tmp_path / "dois", 2), validation_fraction=0.01).notes.warnings if "fracao" in w]


def test_image_and_regularization_folders_inside_one_another(tmp_path):
    ds = good(tmp_path / "ds", 2)
    img(ds / "reg/r.png")
    dataset = built(ds, regularization_dir=str(ds / "reg"))
    assert [item.name for item in dataset.training] == ["ok0.png", "ok1.png"]
    assert any("reg conta só como regularização" in note for note in dataset.notes.notes)
    outer = tmp_path / "classe"
    img(outer / "r.png")
    good(outer / "fotos", 2)
    dataset = built(outer / "fotos", regularization_dir=str(outer))
    assert [item.name for item in dataset.regularization] == ["r.png"]
    assert any("fotos conta só como imagens de treino" in note for note in dataset.notes.notes)
    with pytest.raises(ConfigError, match="própria pasta das imagens"):
        built(ds, regularization_dir=str(ds))


def test_the_image_folder_as_mask_folder_makes_no_image_its_own_mask(tmp_path):
    ds = good(tmp_path / "ds", 2)
    img(ds / "ok0-masklabel.png", 128, 128)
    dataset = built(ds, mask="files", mask_dir=str(ds))
    assert {i.name: i.mask.path.name if i.mask else None for i in dataset.examples} == {
        "ok0.png": "ok0-masklabel.png",
        "ok1.png": None,
    }


def test_errors_name_the_key_in_the_language_of_the_messages(tmp_path):
    for language, key in (("pt", "dados.diretorio_dados"), ("en", "data.data_dir")):
        set_language(language)
        with pytest.raises(DataError) as caught:
            built(tmp_path / "nada")
        assert caught.value.where == key
