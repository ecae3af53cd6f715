"""Files to rows: every format by its content, every fault with file and line (cases C05, C09)."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from text_cases import dataset, tokenizer, write_jsonl

from lora_trainer.errors import DataError
from lora_trainer.text.read import Rows, raise_bad, read_rows

R = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
J = [json.dumps(row) for row in R]
DONE = {
    "list.json": json.dumps(R, indent=1),
    "lines.json": "\n".join(J),
    "list.jsonl": json.dumps(R),
    "blank.jsonl": J[0] + "\n\n  \n" + J[1] + "\n\n",
    "bom.jsonl": "\ufeff" + "\r\n".join(J),
    "wrapped.json": json.dumps({"version": 1, "data": R}, indent=2),
    "mac.jsonl": "\r".join(J),
}


def read(path: Path, text: str | bytes) -> Rows:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(path)


def refusal(path: Path, text: str | bytes) -> str:
    with pytest.raises(DataError) as error:
        raise_bad(read(path, text).bad)
    return str(error.value)


@pytest.mark.parametrize("name", DONE)
def test_json_is_read_as_what_it_is(name: str, tmp_path: Path) -> None:
    rows = read(tmp_path / name, DONE[name])
    assert [row.fields for row in rows.rows] == R
    assert rows.bad == []
    assert rows.notes.warnings == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [("list.json", [2, 6]), ("lines.json", [1, 2]), ("blank.jsonl", [1, 4]), ("bom.jsonl", [1, 2]), ("wrapped.json", [4, 8])],
)
def test_rows_know_their_line(name: str, lines: list[int], tmp_path: Path) -> None:
    rows = read(tmp_path / name, DONE[name])
    assert [row.where for row in rows.rows] == [f"{name}:{line}" for line in lines]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (J[0] + '\n{"instruction": "c", "output": "d",}\n' + J[1], "d.jsonl:2:", "vírgula sobrando"),
        (J[0] + J[1], "d.jsonl:1:", "mais de um objeto"),
        ("{'instruction': 'a'}", "d.jsonl:1:2:", "aspas duplas"),
        (J[0] + '\n{"text": "a', "d.jsonl:2:", "não fecha"),
        (J[0] + '\n{"text": "a\tb"}', "d.jsonl:2:", "TAB"),
        (J[0] + "\n[1, 2]", "d.jsonl:2:", "esperava um objeto"),
        (J[0] + '\n{"text": "\\ud83d"}', "d.jsonl:2:", "Unicode"),
        ('[{"a": 1},\n{"a": 2},\n]', "d.jsonl:2:", "vírgula sobrando"),
        ('[{"a": 1}\n{"a": 2}]', "d.jsonl:1:", "falta vírgula"),
        ('[{"a": 1},\n{"a": 2}', "d.jsonl:2:", "falta `]`"),
        ('[{"a": 1}]\n[{"a": 2}]', "d.jsonl:2:", "depois do fim da lista"),
        ('{\n"data": [\n{"a": 1,}\n]}', "d.jsonl:3:", "vírgula sobrando"),
    ],
)
def test_faults_are_told_with_line_and_column(text: str, where: str, what: str, tmp_path: Path) -> None:
    told = refusal(tmp_path / "d.jsonl", text)
    assert where in told
    assert what in told
    assert "linhas_ruins" in told


def test_all_faults_are_told_at_once_the_first_ten(tmp_path: Path) -> None:
    told = refusal(tmp_path / "d.jsonl", "\n".join([J[0], *["{,}"] * 25]))
    assert told.count("d.jsonl:") == 10
    assert "d.jsonl:11:" in told
    assert "e mais 15" in told


def test_bad_lines_may_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join([J[0], "{,}", '{"colour": "blue"}', J[1]]))
    data = dataset(tmp_path / "d.jsonl", tokenizer(), bad_rows="skip")
    assert [e.where for e in data.examples] == ["d.jsonl:1", "d.jsonl:4"]
    assert [line.split(": ")[0] for line in data.notes.excluded["linhas ruins"]] == ["d.jsonl:2:2", "d.jsonl:3"]
    assert (data.collected.rows, data.collected.dropped) == (4, 2)
    with pytest.raises(DataError, match="colunas desconhecidas") as error:
        dataset(tmp_path / "d.jsonl", tokenizer())
    assert "d.jsonl:2:2" in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("html.json", b"<!DOCTYPE html><title>404</title>", "página web"),
        ("lfs.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-lfs"),
        ("zip.jsonl", gzip.compress(b"{}", mtime=0), "comprimido"),
        ("sheet.csv", b"PK\x03\x04rest", "planilha"),
        ("empty.jsonl", b"\xef\xbb\xbf \n", "vazio"),
        ("false.parquet", b"{}", "não é um arquivo Parquet"),
    ],
)
def test_what_is_no_data_is_named(name: str, data: bytes, what: str, tmp_path: Path) -> None:
    told = refusal(tmp_path / name, data)
    assert name in told
    assert what in told


def test_windows_encoding_is_read_whole_and_told(tmp_path: Path) -> None:
    row = {"prompt": "ação", "completion": "coração, “não é”"}
    rows = read(tmp_path / "d.jsonl", json.dumps(row, ensure_ascii=False).encode("cp1252"))
    assert rows.rows[0].fields == row
    assert "d.jsonl" in rows.notes.warnings[0]
    assert "Windows-1252" in rows.notes.warnings[0]


# -- CSV and Parquet (C09)

ALPACA = [
    {"instruction": "Traduza", "input": "casa", "output": "house", "id": "1"},
    {"instruction": "Diga não", "input": "", "output": "não", "id": "2"},
]


def csv_text(separator: str) -> str:
    return "\n".join([separator.join(ALPACA[0]), *(separator.join(row.values()) for row in ALPACA)]) + "\n"


def alpaca_files(folder: Path) -> list[Path]:
    (folder / "a.csv").write_text(csv_text(","), encoding="utf-8")
    (folder / "pt.csv").write_bytes(csv_text(";").replace("\n", "\r\n").encode("cp1252"))
    (folder / "excel.csv").write_text("sep=;\r\n" + csv_text(";"), encoding="utf-16")
    (folder / "a.tsv").write_text(csv_text("\t"), encoding="utf-8")
    (folder / "a.json").write_text(json.dumps(ALPACA), encoding="utf-8")
    files = [folder / name for name in ("a.csv", "pt.csv", "excel.csv", "a.tsv", "a.json")]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ALPACA), folder / "a.parquet")
        files.append(folder / "a.parquet")
    return files


def test_the_same_rows_in_any_format_give_the_same_tokens(tmp_path: Path) -> None:
    tok = tokenizer()
    found = [[e.input_ids.tolist() for e in dataset(path, tok).examples] for path in alpaca_files(tmp_path)]
    assert len(found[0]) == 2
    assert all(ids == found[0] for ids in found)
    texts = [tok.decode(ids) for ids in found[0]]
    assert texts[0].startswith("### Instruction:\nTraduza\n\ncasa\n\n### Response:\nhouse")
    assert texts[1].startswith("### Instruction:\nDiga não\n\n### Response:\nnão")
    assert "nan" not in texts[1].lower()


def test_csv_cells_hold_line_breaks_and_quotes_and_keep_their_line(tmp_path: Path) -> None:
    text = 'prompt; completion\n"um\ndois; ""três"""; quatro\n"só um"\n\n"a"; "b"\n'
    rows = read(tmp_path / "d.csv", text)
    assert [(row.where, row.fields["prompt"]) for row in rows.rows] == [
        ("d.csv:2", 'um\ndois; "três"'),
        ("d.csv:6", "a"),
    ]
    assert rows.rows[1].fields["completion"] == "b"
    (problem,) = rows.bad
    assert problem.startswith("d.csv:4: 1 campos")


def test_an_open_quote_in_a_csv_is_told_where_it_opens(tmp_path: Path) -> None:
    assert "d.csv:3: uma aspa aberta" in refusal(tmp_path / "d.csv", 'text\nok\n"aberta\nresto\nresto\n')


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    assert "d.csv:1: duas colunas se chamam prompt" in refusal(tmp_path / "d.csv", "prompt,prompt,completion\na,b,c\n")


def test_a_csv_of_a_header_only_is_told(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("prompt,completion\n")
    with pytest.raises(DataError, match="nenhuma linha de dados"):
        dataset(tmp_path / "d.csv", tokenizer())


def test_a_number_that_python_does_not_read_is_told(tmp_path: Path) -> None:
    assert "d.jsonl:2: um número de milhares" in refusal(tmp_path / "d.jsonl", '{"text": "a"}\n{"text": ' + "9" * 5000 + "}")


def test_messages_in_a_csv_cell(tmp_path: Path) -> None:
    cell = json.dumps([{"role": "user", "content": "oi"}, {"role": "assistant", "content": "olá"}]).replace('"', '""')
    (tmp_path / "d.csv").write_text(f'id,messages\n1,"{cell}"\n')
    data = dataset(tmp_path / "d.csv", tokenizer(), chat_template="plain")
    assert data.collected.schemas == {"messages": 1}


def test_parquet_without_pyarrow_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = refusal(tmp_path / "d.parquet", b"PAR1....PAR1")
    assert "pip install pyarrow" in told
    assert "d.parquet" in told


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": [{"role": "user", "content": "oi"}, {"role": "assistant", "content": "olá", "name": "x"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "renamed.jsonl")
    found = read_rows(tmp_path / "renamed.jsonl").rows[0]
    assert found.where == "renamed.jsonl:1"
    assert found.fields["messages"][0] == {"role": "user", "content": "oi"}
    (tmp_path / "half.parquet").write_bytes((tmp_path / "renamed.jsonl").read_bytes()[:40])
    with pytest.raises(DataError, match=r"half\.parquet"):
        read_rows(tmp_path / "half.parquet")


# -- folders


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.TXT").write_text("segundo\ntexto", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "um.md").write_text("primeiro", encoding="utf-8")
    (tmp_path / "._b.txt").write_bytes(b"\0\5\26\7")
    (tmp_path / "c.txt").write_text(" \n")
    rows = read_rows(tmp_path)
    assert [row.where for row in rows.rows] == ["b.TXT:1", "c.txt:1", "a/um.md:1"]
    assert rows.rows[0].fields == {"text": "segundo\ntexto"}
    data = dataset(tmp_path, tokenizer())
    assert data.notes.excluded == {"texto vazio": ["c.txt:1"]}
    assert [row.where for row in read_rows(tmp_path, recursive=False).rows] == ["b.TXT:1", "c.txt:1"]


def test_a_folder_of_tables_leaves_its_read_me_alone(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-00001.jsonl", R[1:])
    write_jsonl(tmp_path / "train-00000.jsonl", R[:1])
    (tmp_path / "README.md").write_text("# about")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "more.jsonl.gz").write_bytes(b"\x1f\x8b")
    rows = read_rows(tmp_path)
    assert [row.fields for row in rows.rows] == R
    assert rows.files == ["train-00000.jsonl", "train-00001.jsonl"]
    assert any("README.md" in note for note in rows.notes.notes)
    assert any("more.jsonl.gz" in warning for warning in rows.notes.warnings)


def test_nothing_to_read_is_told_with_what_could_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nenhum texto em .*\.jsonl"):
        read_rows(tmp_path)
    with pytest.raises(DataError, match="não existe"):
        read_rows(tmp_path / "x.jsonl")


def test_unreadable_files_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("<html>")
    (tmp_path / "b.jsonl").write_text("")
    write_jsonl(tmp_path / "c.jsonl", R)
    with pytest.raises(DataError) as error:
        read_rows(tmp_path)
    assert "a.json: parece uma página web" in str(error.value)
    assert "b.jsonl: está vazio" in str(error.value)
