"""GGUF headers: whole and split files, and a message for each way in which one can be wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from helpers.gguf_files import tiny_model, write_model

from lora_trainer.errors import SourceError
from lora_trainer.files.gguf_reader import is_gguf, open_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_model("llama"), "llama", "Q4_1")


def refused(path: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_gguf(path)
    assert caught.value.where == "modelo_base"
    assert caught.value.hint
    return caught.value.problem


def test_all_that_the_gguf_package_reads(whole):
    file, reference = open_gguf(whole), GGUFReader(whole)
    assert is_gguf(whole)
    assert {t.name for t in reference.tensors} == set(file.tensors)
    for tensor in reference.tensors:
        info = file.tensors[tensor.name]
        assert info.dtype == tensor.tensor_type.name
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert file.raw(tensor.name).numpy().tobytes() == tensor.data.tobytes()
    for name, entry in reference.fields.items():
        if not name.startswith("GGUF."):
            assert file.metadata[name] == entry.contents()
    assert file.architecture == "llama"
    assert file.data_bytes == sum(t.n_bytes for t in reference.tensors)


def test_some_rows(whole):
    file = open_gguf(whole)
    name = "blk.0.ffn_down.weight"
    assert file.raw(name).shape == (64, 96 // 32 * 20)
    assert torch.equal(file.raw(name, (3, 5)), file.raw(name)[3:8])


def test_every_type_of_metadata(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -5, "u64": 1 << 40, "i64": -(1 << 40)}
    for kind, value in values.items():
        getattr(writer, f"add_{'uint' if kind[0] == 'u' else 'int'}{kind[1:]}")(f"x.{kind}", value)
    writer.add_float32("x.f32", 0.5)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.yes", True)
    writer.add_string("x.text", "coração")
    writer.add_array("x.words", ["a", "ção", ""])
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "m.gguf")
    assert {key: found.metadata[f"x.{key}"] for key in values} == values
    assert [found.metadata[f"x.{key}"] for key in ("f32", "f64", "yes", "text")] == [0.5, 0.1, True, "coração"]
    assert found.metadata["x.words"] == ["a", "ção", ""]
    assert found.metadata["x.numbers"] == [1, 2, 3]
    assert found.tensors["t"].offset % 64 == 0
    assert found.raw("t").view(torch.float32).tolist() == [[0.0, 1.0, 2.0]]


def split(whole: Path, folder: Path) -> list[Path]:
    """Two parts as llama.cpp's gguf-split makes them: metadata in the first."""
    source = open_gguf(whole)
    names = list(source.tensors)
    parts = []
    for number, own in enumerate((names[:3], names[3:])):
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        if number == 0:
            writer.add_context_length(128)
        for name in own:
            info = source.tensors[name]
            data = source.raw(name).numpy()
            data = data if len(info.shape) > 1 else data.view(np.float32).reshape(-1)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[info.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


def test_a_split_model_is_one(whole, tmp_path):
    parts = split(whole, tmp_path)
    source = open_gguf(whole)
    for given in parts:
        file = open_gguf(given)
        assert list(file.tensors) == list(source.tensors)
        assert file.metadata["llama.context_length"] == 128
        for name in file.tensors:
            assert torch.equal(file.raw(name), source.raw(name))


def test_parts_missing_or_renamed(whole, tmp_path):
    parts = split(whole, tmp_path)
    renamed = tmp_path / "m.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    assert "uma de 2 partes" in refused(renamed)
    parts[1].unlink()
    assert "m-00002-of-00002.gguf" in refused(parts[0])


def test_truncated_at_every_place(whole, tmp_path):
    data, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    for length in (4, 20, 30, 100, 700, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        assert "cut.gguf está danificado" in refused(cut)


def test_damaged_counts_and_types(whole, tmp_path):
    data, path = bytearray(whole.read_bytes()), tmp_path / "bad.gguf"
    for at, patch in ((8, struct.pack("<Q", 1 << 60)), (16, struct.pack("<Q", 1 << 40)), (24, b"\xff" * 8)):
        path.write_bytes(data[:at] + patch + data[at + len(patch) :])
        assert "danificado" in refused(path)
    kind = data.index(b"general.architecture") + len(b"general.architecture")
    path.write_bytes(data[:kind] + struct.pack("<I", 77) + data[kind + 4 :])
    assert "tipo 77" in refused(path)


def test_no_flipped_byte_of_the_header_is_a_crash(whole, tmp_path):
    data, path = whole.read_bytes(), tmp_path / "flipped.gguf"
    end = min(info.offset for info in open_gguf(whole).tensors.values())
    random, refusals = np.random.default_rng(0), 0
    for at in random.integers(0, end, 300):
        path.write_bytes(data[:at] + bytes([int(random.integers(256))]) + data[at + 1 :])
        try:
            open_gguf(path)
        except SourceError:
            refusals += 1
    assert refusals > 30


def test_other_files(tmp_path, whole):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    assert "não é um arquivo GGUF" in refused(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "versão 1" in refused(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in refused(path)
    path.write_bytes(b"")
    assert "danificado" in refused(path)
    assert "não consegui ler" in refused(tmp_path / "none.gguf")


def test_a_kind_newer_than_the_gguf_package(whole, tmp_path):
    data = bytearray(whole.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 16
    data[at : at + 4] = struct.pack("<I", 999)
    path = tmp_path / "new.gguf"
    path.write_bytes(data)
    assert open_gguf(path).tensors[name.decode()].dtype == "#999"


def test_the_smallest_header(tmp_path):
    """Case 47: a header without metadata or tensors is read; what it lacks is said by who needs it."""
    path = tmp_path / "q.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    file = open_gguf(path)
    assert (file.architecture, file.tensors, file.data_bytes) == ("", {}, 0)
