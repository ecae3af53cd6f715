"""Opening bases: every broken file has its own message, every kind is told from its header (cases G06 G08 G09 G11)."""

import json
import os
import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer.errors import SourceError, set_language
from lora_trainer.files import headers
from lora_trainer.files.classify import classify
from lora_trainer.files.headers import TensorInfo
from lora_trainer.files.sources import open_source


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_file({"a": torch.randn(64, 64)}, tmp_path / "ok.safetensors", {"format": "pt"})
    return (tmp_path / "ok.safetensors").read_bytes()


def refused(path: Path, what: str = "modelo_base") -> SourceError:
    with pytest.raises(SourceError) as caught:
        open_source(str(path), what)
    assert caught.value.hint
    assert caught.value.where == what
    return caught.value


def test_a_whole_file_lists_its_tensors(tmp_path: Path, whole: bytes) -> None:
    source = open_source(str(tmp_path / "ok.safetensors"))
    info = source.header["a"]
    assert (info.dtype, info.shape, info.nbytes, info.offset + info.nbytes) == ("F32", (64, 64), 16384, len(whole))
    assert source.metadata == {"format": "pt"}


def test_half_a_download_says_how_much_is_missing(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "half.safetensors"
    path.write_bytes(whole[: len(whole) // 2])
    error = refused(path)
    have, want = f"{len(whole) // 2:,}".replace(",", "."), f"{len(whole):,}".replace(",", ".")
    assert f"incompleto: tem 8.05 KiB ({have} bytes), o cabeçalho pede 16.10 KiB ({want} bytes)" in error.problem


@pytest.mark.parametrize(("count", "shown"), [(900, "900 bytes"), (3 << 19, "1.50 MiB"), (5 << 29, "2.50 GiB")])
def test_sizes_are_told_in_a_unit_that_fits(count: int, shown: str) -> None:
    assert headers._bytes(count).startswith(shown)


def test_an_error_names_the_key_in_the_language_of_the_messages(tmp_path: Path) -> None:
    for language, key in (("pt", "modelo.modelo_base"), ("en", "model.base_model")):
        set_language(language)
        with pytest.raises(SourceError) as caught:
            open_source(str(tmp_path / "nada.safetensors"))
        assert caught.value.where == key


def test_a_download_cut_inside_the_header(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(whole[:40])
    assert "incompleto" in refused(path).problem


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 6938040682\n", "ponteiro git-lfs"),
        (b"<!DOCTYPE html>" * 50, "página web"),
        (bytes(4096), "zeros"),
        (b"", "vazio"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "GGUF"),
        (b"qualquer coisa que nao e um modelo" * 9, "não é um arquivo .safetensors"),
    ],
)
def test_each_wrong_content_has_its_own_message(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    error = refused(path)
    assert cause in error.problem
    assert "x.safetensors" in error.problem


def test_a_renamed_pickle_is_told_apart(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.bin")
    os.rename(tmp_path / "x.bin", tmp_path / "new.safetensors")
    (tmp_path / "old.safetensors").write_bytes(pickle.dumps({"a": 1}, protocol=2) + bytes(600))
    for name in ("new.safetensors", "old.safetensors"):
        assert "pickle com nome errado" in refused(tmp_path / name).problem


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (os.mkdir, (str(Path(os.environ["BOMB_DIR"]) / "exploded"),))


@pytest.mark.parametrize("name", ["x.ckpt", "x.pt", "x.bin", "x.safetensors"])
def test_a_pickle_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("BOMB_DIR", str(tmp_path))
    (tmp_path / name).write_bytes(pickle.dumps(Bomb(), protocol=4))
    error = refused(tmp_path / name)
    assert "pickle" in error.problem
    assert "safetensors" in error.hint
    assert not (tmp_path / "exploded").exists()


def test_a_header_that_lies_about_sizes_is_damaged(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "estragado" in refused(tmp_path / "x.safetensors").problem


def test_headers_are_read_without_torch() -> None:
    code = "import sys, lora_trainer.files.sources; sys.exit('torch' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", f'"{code}"' if os.name == "nt" else code]) == 0


# -- places


def test_a_missing_file_names_what_lies_beside_it(tmp_path: Path, whole: bytes) -> None:
    error = refused(tmp_path / "okay.safetensors")
    assert str(tmp_path / "okay.safetensors") in error.problem
    assert "ok.safetensors" in error.hint


def test_a_path_never_touches_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("network"))
    for text in (str(tmp_path / "no"), "./pasta/modelo", "modelos/x.safetensors", "~/x/y", "D:/modelos/x.safetensors"):
        with pytest.raises(SourceError):
            open_source(text)


def test_folders(tmp_path: Path, whole: bytes) -> None:
    for name in ("one", "two", "old", "none"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "m.safetensors").write_bytes(whole)
    assert open_source(str(tmp_path / "one")).kind == "file"
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes(whole)
    assert "a.safetensors, b.safetensors" in refused(tmp_path / "two").problem
    (tmp_path / "old" / "m.ckpt").write_bytes(b"\x80\x02")
    assert "pickle" in refused(tmp_path / "old").problem
    assert "não tem modelo" in refused(tmp_path / "none").problem


def component(tmp_path: Path, *names: str) -> Path:
    (tmp_path / "unet").mkdir(parents=True)
    (tmp_path / "unet" / "config.json").write_text("{}")
    for name in names:
        (tmp_path / "unet" / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16.safetensors"),
        (["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors"],
         "diffusion_pytorch_model.safetensors"),
        (["model.safetensors", "model.non_ema.safetensors", "pytorch_model.bin"], "model.safetensors"),
    ],
)  # fmt: skip
def test_the_weights_of_a_component(tmp_path: Path, names: list[str], chosen: str) -> None:
    source = open_source(str(component(tmp_path, *names)))
    assert [path.name for path in source.weight_files("unet")] == [chosen]


def test_sharded_weights_and_a_missing_shard(tmp_path: Path) -> None:
    source = open_source(str(component(tmp_path, "a-1.safetensors", "a-2.safetensors")))
    index = tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}))
    assert [path.name for path in source.weight_files("unet")] == ["a-1.safetensors", "a-2.safetensors"]
    (tmp_path / "unet" / "a-2.safetensors").unlink()
    with pytest.raises(SourceError, match=r"faltam partes do modelo: a-2\.safetensors"):
        source.weight_files("unet")


@pytest.mark.parametrize("places", [None, {}, ["a-1.safetensors"], {"x": 7}])
def test_an_index_that_names_no_files_is_told(tmp_path: Path, places: object) -> None:
    source = open_source(str(component(tmp_path, "a-1.safetensors", "a-2.safetensors")))
    index = tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(SourceError, match="weight_map"):
        source.weight_files("unet")


def test_a_component_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="pickle"):
        open_source(str(component(tmp_path, "diffusion_pytorch_model.bin"))).weight_files("unet")


# -- Hugging Face ids


def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path / "models--dono--modelo"


def test_an_id_that_is_nowhere_gives_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub_cache(monkeypatch, tmp_path)
    with pytest.raises(SourceError) as caught:
        open_source("dono/modelo")
    assert "dono/modelo" in caught.value.problem
    assert "internet" in caught.value.hint


def test_a_cached_id_opens_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repo = hub_cache(monkeypatch, tmp_path)
    snapshot = repo / "snapshots" / ("0" * 40)
    component(snapshot, "diffusion_pytorch_model.fp16.safetensors")
    (snapshot / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    source = open_source("dono/modelo")
    assert source.path == snapshot
    assert source.title() == "dono/modelo"
    (snapshot / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    with pytest.raises(SourceError, match="não pôde ser baixado"):
        open_source("dono/modelo")


# -- kinds


def header(*names: str, **shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {name: TensorInfo("F16", shapes.get(name, (1,)), 2) for name in (*names, *shapes)}


IN = "model.diffusion_model.input_blocks.0.0.weight"
UNET = {IN: (320, 4, 3, 3)}
LABEL = "model.diffusion_model.label_emb.0.0.weight"
CLIP_L, OPEN_CLIP = "transformer.text_model.embeddings.token_embedding.weight", "model.token_embedding.weight"


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("sd1", header(f"cond_stage_model.{CLIP_L}", **UNET)),
        ("sd2", header(f"cond_stage_model.{OPEN_CLIP}", **UNET)),
        ("sdxl", header(LABEL, f"conditioner.embedders.0.{CLIP_L}", f"conditioner.embedders.1.{OPEN_CLIP}", **UNET)),
        ("sdxl_refiner", header(LABEL, f"conditioner.embedders.0.{OPEN_CLIP}", **UNET)),
        ("unclip", header(LABEL, f"cond_stage_model.{OPEN_CLIP}", **UNET)),
        ("inpainting", header(f"cond_stage_model.{CLIP_L}", **{IN: (320, 9, 3, 3)})),
        ("pix2pix", header(f"cond_stage_model.{CLIP_L}", **{IN: (320, 8, 3, 3)})),
        ("depth", header(f"cond_stage_model.{OPEN_CLIP}", **{IN: (320, 5, 3, 3)})),
        ("unet", header(**UNET)),
        ("unet", header("down_blocks.0.resnets.0.time_emb_proj.weight")),
        ("flux", header("double_blocks.0.img_attn.qkv.weight")),
        ("flux", header("model.diffusion_model.double_blocks.0.img_attn.qkv.weight")),
        ("sd3", header("model.diffusion_model.joint_blocks.0.context_block.attn.qkv.weight")),
        ("dit", header("blocks.0.self_attn.q.weight")),
        ("lora", header("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight")),
        ("lora", header("unet.mid_block.attentions.0.proj_in.lora_A.weight")),
        ("lora", header("transformer.single_transformer_blocks.0.attn.to_q.lora_B.weight")),
        ("vae", header("encoder.conv_in.weight", "decoder.conv_in.weight")),
        ("vae", header("first_stage_model.encoder.conv_in.weight", "first_stage_model.decoder.conv_in.weight")),
        ("t5", header("encoder.block.0.layer.0.SelfAttention.q.weight")),
        ("clip", header("text_model.embeddings.token_embedding.weight")),
        ("clip", header("transformer.resblocks.0.attn.in_proj_weight")),
        ("language_model", header("model.layers.0.self_attn.q_proj.weight")),
        ("embedding", header("emb_params")),
        ("controlnet", header("control_model.input_blocks.0.0.weight")),
        ("unknown", header("a", "b")),
        ("unknown", header()),
    ],
)  # fmt: skip
def test_kinds_from_headers(kind: str, found: dict[str, TensorInfo]) -> None:
    assert classify(found).name == kind


def test_an_fp8_file_of_an_unknown_model_is_unknown(tmp_path: Path) -> None:
    fp8 = {"w": torch.randn(8, 8).to(torch.float8_e4m3fn), "w.scale_weight": torch.tensor(0.5)}
    save_file(fp8, tmp_path / "f8.safetensors")
    source = open_source(str(tmp_path / "f8.safetensors"))
    assert source.header["w"].dtype == "F8_E4M3"
    assert source.looks_like().name == "unknown"
