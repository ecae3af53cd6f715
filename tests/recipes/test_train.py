"""The real command line on tiny real classes: every kind of base, to a file that diffusers loads."""

import json

import pytest
import torch
from recipe import events, make, run
from safetensors import safe_open
from safetensors.torch import load_file

from lora_trainer.diffusion.diffusion import DiffusionFamily

BASES = [("sd1", True), ("sd1", False), ("sd2", True), ("sdxl", True), ("sdxl", False), ("flux", True), ("flux", False)]
FILES = {
    "flux": ["lora.safetensors", "lora-kohya.safetensors"],
    "": ["lora.safetensors", "lora-diffusers.safetensors"],
}


@pytest.mark.parametrize(("release", "single_file"), BASES)
def test_end_to_end(tmp_path, capsys, release, single_file):
    config = make(tmp_path, release, single_file=single_file, saida={"formatos": ["auto", "kohya", "diffusers"]})
    files = FILES.get(release, FILES[""])
    assert run(config) == 0
    out, folder = capsys.readouterr().out, tmp_path / "saida" / "lora"
    assert "pronto:" in out
    assert len(events(folder)) == 6  # 6 images in 3 buckets: 4 micro-batches, 2 windows, 3 epochs
    assert [row["lr"] for row in events(folder)] == [0.01] * 6
    for name in files:
        tensors = load_file(folder / name)
        assert all(bool(value.isfinite().all()) for value in tensors.values())
    assert events(folder, "done")[0]["files"] == files
    assert (folder / "perda.png").stat().st_size > 1000


@pytest.mark.parametrize("release", ["sd1", "sdxl"])
def test_text_encoders_and_convolutions(tmp_path, release):
    config = make(
        tmp_path,
        release,
        modelo={"alvos_lora": "tudo", "treinar_codificador_texto": True, "classificacao_conv": 2},
        saida={"formatos": ["kohya", "diffusers"]},
    )
    assert run(config) == 0
    tensors = load_file(tmp_path / "saida" / "lora" / "lora.safetensors")
    encoders = ["lora_te_"] if release == "sd1" else ["lora_te1_", "lora_te2_"]
    for prefix in encoders:
        ups = [value for key, value in tensors.items() if key.startswith(prefix) and "lora_up" in key]
        assert ups
        assert any(bool(value.any()) for value in ups)
    convs = [value for key, value in tensors.items() if "lora_down" in key and value.ndim == 4 and value.shape[-1] == 3]
    assert convs
    assert all(len(value) == 2 for value in convs)


def test_same_seed_same_file_and_cache(tmp_path, capsys):
    config = make(tmp_path)
    assert run(config) == 0
    first = (tmp_path / "saida" / "lora" / "lora.safetensors").read_bytes()
    capsys.readouterr()
    assert run(config) == 0
    out = capsys.readouterr().out
    assert "lora.antigo-1" in out
    assert "(0 codificadas agora)" in out
    assert (tmp_path / "saida" / "lora" / "lora.safetensors").read_bytes() == first
    assert (tmp_path / "saida" / "lora.antigo-1" / "lora.safetensors").read_bytes() == first
    assert run(config, "sistema.semente=8") == 0
    other = load_file(tmp_path / "saida" / "lora" / "lora.safetensors")
    before = load_file(tmp_path / "saida" / "lora.antigo-1" / "lora.safetensors")
    assert any(not torch.equal(other[key], before[key]) for key in other if "lora_down" in key)


def test_previews_change_nothing(tmp_path):
    config = make(tmp_path)
    assert run(config, "saida.nome=sem") == 0
    assert (
        run(config, "saida.nome=com", 'amostras.prompts=["a cat","red"]', "amostras.cada=2", "amostras.passos=2") == 0
    )
    with_previews, without = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("com", "sem"))
    assert all(torch.equal(with_previews[key], without[key]) for key in without)
    pictures = sorted(path.name for path in (tmp_path / "saida" / "com" / "amostras").iterdir())
    assert pictures == ["passo-000002.png", "passo-000004.png", "passo-000006.png"]


def test_f05_preview_out_of_memory_is_told_and_survived(tmp_path, monkeypatch, capsys):
    from lora_trainer.families.sd15.family import SD15

    config = make(tmp_path, amostras={"prompts": ["a cat"], "cada": 2, "passos": 2})
    assert run(config, "amostras.prompts=[]", "saida.nome=sem") == 0
    calls = []

    def decode(self, vae, latents):
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB")

    monkeypatch.setattr(SD15, "decode_image", decode)
    assert run(config) == 0
    folder = tmp_path / "saida" / "lora"
    assert len(events(folder, "preview_failed")) == 3
    assert [event["rung"] for event in events(folder, "oom")] == ["one", "skipped", "skipped", "skipped"]
    assert len(calls) == 4, "the first one twice, and from then on with care"
    out = capsys.readouterr().out
    assert "amostra do passo 2 falhou" in out
    assert "amostra do passo 4 falhou" not in out, "told once"
    plain, survived = load_file(tmp_path / "saida/sem/sem.safetensors"), load_file(folder / "lora.safetensors")
    assert all(torch.equal(plain[key], survived[key]) for key in plain)


def test_validation_is_fixed_and_changes_nothing(tmp_path):
    config = make(tmp_path, dados={"fracao_validacao": 0.3}, treino={"validar_cada": 1, "taxa_aprendizado": 1e-9})
    assert run(config) == 0
    folder = tmp_path / "saida" / "lora"
    rows = [json.loads(line) for line in (folder / "metricas.jsonl").read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert len(losses) == 1 + len(events(folder)), "once before the first step"
    assert max(losses) - min(losses) < 1e-5  # same images, noise and timesteps each time, and a model that stands still


def test_divergence_exits_4_and_names_the_last_good_file(tmp_path, capsys, monkeypatch):
    config = make(tmp_path, saida={"salvar_cada": 1, "precisao": "fp32"})
    loss, calls = DiffusionFamily.loss, []

    def explode(self, model, batch):  # windows of 2 and 1 micro-batches: the seventh is in step 5
        calls.append(1)
        return loss(self, model, batch) * (float("nan") if len(calls) > 6 else 1)

    monkeypatch.setattr(DiffusionFamily, "loss", explode)
    assert run(config) == 4
    err = capsys.readouterr().err
    folder = tmp_path / "saida" / "lora"
    assert "divergiu no passo 5" in err
    assert "lora-passo000004.safetensors" in err
    assert not (folder / "lora.safetensors").exists()
    good = load_file(folder / "lora-passo000004.safetensors")
    assert all(bool(value.isfinite().all()) for value in good.values())


def test_metadata_tells_what_it_is(tmp_path):
    config = make(tmp_path, "sdxl", dados={"palavra_gatilho": "ohwx"})
    assert run(config) == 0
    with safe_open(tmp_path / "saida/lora/lora.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert metadata["modelspec.trigger_phrase"] == "ohwx"
    assert metadata["ss_network_dim"] == "4"
    assert metadata["ss_network_alpha"] == "8"
    assert str(tmp_path) not in json.dumps(metadata)
    assert "treino" not in metadata["lora_trainer.config"]
    assert json.loads(metadata["lora_trainer.config"])["training"]["epochs"] == 3
