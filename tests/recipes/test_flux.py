"""FLUX.1 through the real command line: every kind of base, resume, previews, an initial LoRA, the memory techniques."""

import pytest
import torch
from diffusers import FluxPipeline
from helpers import flux_bases
from recipe import draw_images, events, make, run
from safetensors.torch import load_file

TARGETS = {"alvos_lora": "tudo", "classificacao_lora": 4, "alfa_lora": 8}


def base_options(kind, folder):
    options, _ = flux_bases.write_files(folder / kind, kind)
    return [f"modelo.{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize("kind", ["fp8", "fp8_scaled", "gguf", "all_in_one"])
def test_every_kind_of_base(tmp_path, capsys, kind):
    config = make(tmp_path, "flux", treino={"epocas": 1})
    assert run(config, *base_options(kind, tmp_path), "modelo.alvos_lora=atencao+mlp") == 0
    out = capsys.readouterr().out
    assert "pronto:" in out
    assert kind == "all_in_one" or "o modelo base fica como está no arquivo" in out


def test_resume_is_bit_equal(tmp_path):
    config = make(tmp_path, "flux", modelo={"dropout_lora": 0.1}, treino={"media_movel": 0.9})
    assert run(config, "saida.nome=reto") == 0
    assert run(config, "treino.passos_maximos=3") == 0
    assert run(config, "--retomar") == 0
    resumed, straight = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("lora", "reto"))
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert len(events(tmp_path / "saida" / "lora")) == 6


def test_previews_change_nothing(tmp_path):
    config = make(tmp_path, "flux")
    assert run(config, "saida.nome=sem") == 0
    drawn = ['amostras.prompts=["a cat","red"]', "amostras.cada=3", "amostras.passos=2"]
    assert run(config, "saida.nome=com", *drawn) == 0
    without, with_previews = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("sem", "com"))
    assert all(torch.equal(with_previews[key], without[key]) for key in without)
    pictures = sorted(path.name for path in (tmp_path / "saida" / "com" / "amostras").iterdir())
    assert pictures == ["passo-000003.png", "passo-000006.png"]


@pytest.mark.parametrize("layout", ["lora", "lora-kohya"])
def test_a_lora_of_either_layout_is_gone_on_from(tmp_path, layout):
    config = make(tmp_path, "flux", modelo=TARGETS, saida={"formatos": ["diffusers", "kohya"]})
    assert run(config) == 0
    first = tmp_path / "saida" / "lora" / f"{layout}.safetensors"
    kept = first.rename(tmp_path / "first.safetensors")
    config = make(tmp_path, "flux", modelo={**TARGETS, "lora_inicial": str(kept)}, treino={"taxa_aprendizado": 1e-12})
    assert run(config, "saida.nome=outro", "saida.formatos=[diffusers]", "treino.passos_maximos=1") == 0
    before = load_file(tmp_path / "saida" / "lora" / "lora.safetensors") if layout != "lora" else load_file(kept)
    after = load_file(tmp_path / "saida" / "outro" / "outro.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        if "lora_A" in key:
            product = [s[key.replace("lora_A", "lora_B")] @ s[key] for s in (before, after)]
            assert torch.allclose(*product, atol=1e-6)


def test_the_pipeline_loads_the_file(tmp_path):
    """FluxPipeline.load_lora_weights, with rank and alpha that differ."""
    config = make(tmp_path, "flux", single_file=False, modelo=TARGETS)
    assert run(config) == 0
    tensors = load_file(tmp_path / "saida" / "lora" / "lora.safetensors")
    assert all(key.startswith("transformer.") for key in tensors)
    assert not any("alpha" in key for key in tensors)
    pipeline = FluxPipeline.from_pretrained(tmp_path / "base", local_files_only=True)
    pipeline.load_lora_weights(str(tmp_path / "saida" / "lora" / "lora.safetensors"))
    layers = {name: m for name, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == len(tensors) // 2
    assert {m.scaling["default_0"] for m in layers.values()} == {1.0}


def test_low_vram_options_run(tmp_path):
    draw_images(tmp_path / "fotos")
    config = make(
        tmp_path, "flux", treino={"checkpoint_gradiente": "sim", "passos_maximos": 2},
        memoria={"quantizacao_base": "nf4", "streaming_blocos": 1.0, "descarga_ativacoes": "sim", "streaming_texto": "sim"},
    )  # fmt: skip
    assert run(config) == 0
