"""Nothing bad or half-written reaches the disk; equal adapters give equal bytes (E06, G11, H06)."""

import errno
import hashlib
import logging
import os
import struct

import pytest
import torch
from adapter_models import SD15, sd15_model, trained
from safetensors import safe_open
from safetensors.torch import load_file

from lora_trainer.adapters import inject
from lora_trainer.config.schema import ModelConfig
from lora_trainer.errors import DivergedError, MachineError
from lora_trainer.export import write
from lora_trainer.export.write import save_adapter, write_atomically


def _metadata(path):
    with safe_open(str(path), "pt") as file:
        return file.metadata()


@pytest.mark.parametrize(("precision", "dtype"), list(write.DTYPES.items()))
@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_precision(layout, precision, dtype, tmp_path):
    _, adapter, family = trained("sd15", lora_rank=4)
    tensors = load_file(save_adapter(adapter, family, tmp_path / "x.safetensors", layout, precision, {}))
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}


def test_an_alpha_that_half_precision_cannot_hold_stays_exact(tmp_path):
    _, adapter, family = trained("sd15", lora_rank=8, lora_alpha=8, rslora=True)
    tensors = load_file(save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {}))
    alphas = {value.item() for key, value in tensors.items() if key.endswith(".alpha")}
    assert [*alphas] == [pytest.approx(8 * 8**0.5, rel=1e-7)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_is_refused_and_the_old_file_stays(value, tmp_path):
    _, adapter, family = trained("sd15")
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    before = path.read_bytes()
    with torch.no_grad():
        next(iter(adapter.named_parameters().values()))[0, 0] = value
    with pytest.raises(DivergedError) as error:
        save_adapter(adapter, family, path, "kohya", "fp16", {})
    assert error.value.exit_code == 4
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-4])
def test_tiny_weights_survive_fp16(layout, scale, tmp_path, caplog):
    """At a rate of 1e-7 B is below what fp16 can hold; the effect must be kept all the same."""
    _, adapter, family = trained("sd15", lora_rank=8, lora_alpha=1)
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.mul_(10 * scale)
    path = save_adapter(adapter, family, tmp_path / "x.safetensors", layout, "fp16", {})
    tensors, state = load_file(path), adapter.state_dict()
    nonzero = sum(int(value.count_nonzero()) for value in state.values())
    stored = sum(int(value.count_nonzero()) for key, value in tensors.items() if not key.endswith(".alpha"))
    assert stored >= 0.999 * nonzero
    other = inject(sd15_model(), SD15, ModelConfig(lora_rank=8, lora_alpha=1), 0)
    other.load_file(path)
    theirs = other.export()
    for name, module in adapter.export().items():
        assert (theirs[name].delta() - module.delta()).norm() < 1e-3 * module.delta().norm()
    assert not caplog.records


def test_values_lost_in_fp16_are_reported(tmp_path, caplog):
    _, adapter, family = trained("sd15", lora_rank=4)
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter[1:] = 1e-12
    with caplog.at_level(logging.WARNING):
        save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    assert "viraram zero" in caplog.text


def test_weights_beyond_fp16_are_a_diverged_training(tmp_path):
    _, adapter, family = trained("sd15")
    with torch.no_grad():
        for parameter in adapter.named_parameters().values():
            parameter.mul_(1e7)
    with pytest.raises(DivergedError, match=r"diminua|passa do máximo"):
        save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {})
    assert not os.listdir(tmp_path)
    assert save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp32", {}).exists()


def test_large_up_with_small_down_is_balanced_not_refused(tmp_path):
    _, adapter, family = trained("sd15")
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            parameter.mul_(1e7 if "lora_B" in key else 1e-7)
    assert save_adapter(adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {}).exists()


def test_hashes_are_of_the_file(tmp_path):
    """Over the bytes after the header, also with several dtypes inside."""
    _, adapter, family = trained("sd15", lora_rank=8, lora_alpha=8, rslora=True)
    path = save_adapter(
        adapter, family, tmp_path / "x.safetensors", "kohya", "fp16", {"ss_steps": 3, "modelspec.title": "á"}
    )
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    digest = hashlib.sha256(raw[8 + size :]).hexdigest()
    metadata = _metadata(path)
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16, torch.float32}
    assert metadata["sshs_model_hash"] == digest
    assert metadata["modelspec.hash_sha256"] == f"0x{digest}"
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(b"").hexdigest()[:8]  # a file under 1 MiB
    assert size % 8 == 0
    assert (metadata["ss_steps"], metadata["modelspec.title"]) == ("3", "á")


def test_legacy_hash_of_a_larger_file():
    tensors = {"a": torch.arange(400_000, dtype=torch.float32)}
    data = write.serialise(tensors, {"ss_steps": "1", "modelspec.title": "x"})
    alone = write._with_header(
        {"a": {"dtype": "F32", "shape": [400_000], "data_offsets": [0, 1_600_000]}},
        {"ss_steps": "1"},
        tensors["a"].numpy().tobytes(),
    )
    assert f'"sshs_legacy_hash":"{hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]}"'.encode() in data


def test_equal_adapters_give_equal_bytes(tmp_path):
    """The safetensors library alone would not: it orders metadata at random."""
    metadata = {f"k{i}": i for i in range(30)}
    backwards = dict(reversed(metadata.items()))
    files = []
    for name, entries in (("a", metadata), ("b", backwards)):
        _, adapter, family = trained("sd15", lora_rank=2)
        files.append(
            save_adapter(adapter, family, tmp_path / f"{name}.safetensors", "kohya", "fp16", entries).read_bytes()
        )
    assert files[0] == files[1]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(moment, tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    write_atomically(path, b"old")

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "write":
        path_class = type(path)
        opened = path_class.open
        monkeypatch.setattr(path_class, "open", lambda self, mode="r": fail() if "w" in mode else opened(self, mode))
    else:
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(MachineError, match="disco está cheio"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.bin"]


def test_folders_are_made(tmp_path):
    write_atomically(tmp_path / "a" / "b" / "x.bin", b"1")
    assert (tmp_path / "a" / "b" / "x.bin").read_bytes() == b"1"


def test_a_folder_that_cannot_be_made_is_the_users_problem(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(MachineError, match="não foi possível gravar"):
        write_atomically(tmp_path / "a" / "x.bin", b"1")
