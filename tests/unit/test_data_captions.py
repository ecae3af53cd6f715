"""Which text belongs to an image. Cases B01, B04, B05 of the bug reports, and the stated order."""

import json

import pytest
from data_cases import built, cap, captions, good, img, left_out

from lora_trainer.data.text import decode
from lora_trainer.errors import DataError


def warnings(dataset):
    return "\n".join(dataset.notes.warnings)


def table(folder, rows, name="metadata.jsonl"):
    cap(folder / name, "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def three(folder):
    for i in range(3):
        img(folder / f"{i}.png")
    return [{"file_name": f"{i}.png", "text": f"gato {i}"} for i in range(3)]


# -- B01: encodings


def test_windows_encoding_keeps_every_letter_and_warns_once(tmp_path):
    ds = good(tmp_path / "ds")
    img(ds / "a.png")
    cap(ds / "a.txt", "ação de ohwx, coração, não é", "latin-1")
    img(ds / "b.png")
    cap(ds / "b.txt", "o gato\u2019s \u201clindo\u201d", "cp1252")
    dataset = built(ds)
    assert captions(dataset)["a.png"] == "ação de ohwx, coração, não é"
    assert captions(dataset)["b.png"] == "o gato’s “lindo”"
    told = [line for line in dataset.notes.warnings if "1252" in line]
    assert len(told) == 1
    assert "a.txt" in told[0]
    assert "b.txt" in told[0]
    assert "coração" in told[0]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode_needs_no_warning(tmp_path, encoding):
    img(tmp_path / "ds/a.png")
    cap(tmp_path / "ds/a.txt", "coração à noite", encoding)
    dataset = built(tmp_path / "ds")
    assert captions(dataset) == {"a.png": "coração à noite"}
    assert not dataset.notes.warnings


def test_bytes_without_any_meaning_still_lose_nothing():
    assert len(decode(bytes(range(0x80, 0x100))).text) == 128


def test_decomposed_accents_and_line_ends(tmp_path):
    img(tmp_path / "ds/a.png")
    cap(tmp_path / "ds/a.txt", "cac\u0327a\u0303o\r\nna praia\n")
    assert captions(built(tmp_path / "ds")) == {"a.png": "cação na praia".replace("\u0327", "")}


# -- B05: empty and missing captions


def empty(folder):
    for name in "abc":
        img(folder / f"{name}.png")
    cap(folder / "b.txt", "")
    cap(folder / "c.txt", " \n\t")
    return folder


def test_empty_captions_take_the_trigger(tmp_path):
    dataset = built(empty(tmp_path / "ds"), trigger="ohwx")
    assert set(captions(dataset).values()) == {"ohwx"}
    assert any("3 de 3 sem legenda" in line for line in dataset.notes.notes)


def test_empty_captions_take_the_class_of_the_folder(tmp_path):
    assert set(captions(built(empty(tmp_path / "ds/5_gato azul").parent)).values()) == {"gato azul"}


def test_without_trigger_a_warning(tmp_path):
    dataset = built(empty(tmp_path / "ds"))
    assert set(captions(dataset).values()) == {""}
    assert "3 de 3 sem legenda" in warnings(dataset)


def test_uncaptioned_images_can_be_skipped_or_refused(tmp_path):
    ds = empty(tmp_path / "ds")
    good(ds, 1)
    dataset = built(ds, uncaptioned="skip", trigger="ohwx")
    assert list(captions(dataset)) == ["ok0.png"]
    assert left_out(dataset) == ["a.png", "b.png", "c.png"]
    with pytest.raises(DataError, match=r"3 de 4 sem legenda: a\.png"):
        built(ds, uncaptioned="stop")


# -- B04: tables


def test_table(tmp_path):
    table(tmp_path / "ds", three(tmp_path / "ds"))
    dataset = built(tmp_path / "ds")
    assert captions(dataset) == {f"{i}.png": f"gato {i}" for i in range(3)}
    assert not dataset.notes.warnings


def test_a_lookalike_name_is_named(tmp_path):
    table(tmp_path / "ds", three(tmp_path / "ds"), "metadata.json1")
    assert "metadata.json1 não foi lido" in warnings(built(tmp_path / "ds"))


@pytest.mark.parametrize("column", ["caption", "prompt"])
def test_another_column_if_it_is_the_only_one(tmp_path, column):
    rows = [{"file_name": row["file_name"], column: row["text"], "width": 3} for row in three(tmp_path / "ds")]
    table(tmp_path / "ds", rows)
    assert captions(built(tmp_path / "ds"))["1.png"] == "gato 1"


def test_two_candidate_columns_are_listed_and_can_be_chosen(tmp_path):
    rows = [{"file_name": r["file_name"], "longa": r["text"], "curta": "g"} for r in three(tmp_path / "ds")]
    table(tmp_path / "ds", rows)
    with pytest.raises(DataError, match=r"colunas: file_name, longa, curta.*coluna_legenda"):
        built(tmp_path / "ds")
    assert captions(built(tmp_path / "ds", caption_column="longa"))["2.png"] == "gato 2"
    with pytest.raises(DataError, match="`outra`"):
        built(tmp_path / "ds", caption_column="outra")


def test_missing_rows_and_images_are_counted(tmp_path):
    rows = three(tmp_path / "ds")
    table(tmp_path / "ds", [*rows[:2], {"file_name": "ausente.png", "text": "x"}])
    told = warnings(built(tmp_path / "ds"))
    assert "1 linha sem uso" in told
    assert "ausente.png" in told
    assert "1 imagem sem linha: 2.png" in told


def test_a_list_of_texts_is_several_captions(tmp_path):
    rows = three(tmp_path / "ds")
    rows[0]["text"] = ["a", "b"]
    table(tmp_path / "ds", rows)
    assert built(tmp_path / "ds").examples[0].caption.texts == ("a", "b")


def test_csv_header_spaces_and_unquoted_commas(tmp_path):
    ds = tmp_path / "ds"
    img(ds / "images/1.jpg")
    img(ds / "images/2.jpg")
    cap(ds / "metadata.csv", "image, caption\n1.jpg, um gato, sentado\n2.jpg, um gato\n")
    with pytest.raises(DataError, match=r"metadata\.csv:2: 3 campos.*aspas"):
        built(ds)
    cap(ds / "metadata.csv", 'image, caption\n1.jpg, "um gato, sentado"\n2.jpg, um gato\n')
    assert captions(built(ds)) == {"images/1.jpg": "um gato, sentado", "images/2.jpg": "um gato"}


def test_excel_csv_in_portuguese(tmp_path):
    img(tmp_path / "ds/1.jpg")
    cap(tmp_path / "ds/metadata.csv", "file_name;text\r\n1.jpg;não, é um cão\r\n", "cp1252")
    dataset = built(tmp_path / "ds")
    assert captions(dataset) == {"1.jpg": "não, é um cão"}
    assert "metadata.csv" in warnings(dataset)


def test_broken_rows_are_told_together(tmp_path):
    img(tmp_path / "ds/1.jpg")
    cap(tmp_path / "ds/metadata.jsonl", '\n{"file_name": "1.jpg", "text": "a",}\n["x"]\n{"text": 1}\n3')
    with pytest.raises(DataError) as caught:
        built(tmp_path / "ds")
    assert "metadata.jsonl:2:" in str(caught.value)
    assert "metadata.jsonl:5" in str(caught.value)


def test_a_table_without_file_names(tmp_path):
    img(tmp_path / "ds/1.jpg")
    cap(tmp_path / "ds/metadata.jsonl", '{"text": "a"}')
    with pytest.raises(DataError, match=r"file_name.*colunas: text"):
        built(tmp_path / "ds")


# -- order and trigger


def test_stated_order(tmp_path):
    ds = tmp_path / "ds" / "1_classe"
    rows = [{"file_name": f"{n}.png", "text": "tabela"} for n in "abc"]
    for name in "abcde":
        img(ds / f"{name}.png")
    table(ds, rows)
    cap(ds / "a.txt", "txt")
    cap(ds / "a.caption", "caption")
    cap(ds / "b.caption", "caption")
    assert list(captions(built(ds.parent)).values()) == ["txt", "caption", "tabela", "classe", "classe"]
    cap(ds.parent / "default.txt", "padrão")
    assert list(captions(built(ds.parent)).values()) == ["txt", "caption", "tabela", "padrão", "padrão"]


def test_trigger_is_put_first_once(tmp_path):
    ds = tmp_path / "ds"
    for name, text in {"a": "um gato", "b": "foto de OHWX, gato", "c": "retrato de [trigger]", "d": "xohwxx"}.items():
        img(ds / f"{name}.png")
        cap(ds / f"{name}.txt", text)
    assert list(captions(built(ds, trigger="ohwx")).values()) == [
        "ohwx, um gato", "foto de OHWX, gato", "retrato de ohwx", "ohwx, xohwxx",
    ]  # fmt: skip
    assert "[trigger] aparece em c.png" in warnings(built(ds))


@pytest.mark.parametrize("value", [{"pt": "gato"}, [{"text": "gato"}], ["gato", ["cão"]], True, "meio \ud83d"])
def test_a_caption_that_is_no_text_is_refused_with_its_line(tmp_path, value):
    rows = three(tmp_path / "ds")
    rows[1]["text"] = value
    cap(tmp_path / "ds/metadata.jsonl", "\n".join(json.dumps(row) for row in rows))
    with pytest.raises(DataError, match=r"metadata\.jsonl:2: text: a legenda ") as caught:
        built(tmp_path / "ds")
    str(caught.value).encode("utf-8")


def test_numbers_and_lists_of_texts_are_captions(tmp_path):
    rows = three(tmp_path / "ds")
    rows[0]["text"], rows[1]["text"] = 2024, ["a", "b"]
    table(tmp_path / "ds", rows)
    assert {item.caption.texts for item in built(tmp_path / "ds").examples} == {("2024",), ("a", "b"), ("gato 2",)}


def test_a_lone_row_with_a_list_of_objects_is_a_row(tmp_path):
    img(tmp_path / "ds/1.png")
    table(tmp_path / "ds", [{"file_name": "1.png", "text": "gato", "objects": [{"box": [0, 0, 1, 1]}]}])
    assert captions(built(tmp_path / "ds")) == {"1.png": "gato"}


def test_two_rows_for_one_image_are_said_with_their_lines(tmp_path):
    rows = three(tmp_path / "ds")
    table(tmp_path / "ds", [*rows, {"file_name": "./1.png", "text": "outro"}])
    dataset = built(tmp_path / "ds")
    assert captions(dataset)["1.png"] == "outro"
    assert "vale a última: 1.png (metadata.jsonl:2, metadata.jsonl:4)" in warnings(dataset)
