"""Transformer families through the real command line: every kind of base, resume, previews, an initial LoRA, techniques."""

import diffusers
import pytest
import torch
from helpers.bases import KINDED, NAMES, of, written
from helpers.bases import pipeline as open_pipeline
from recipe import draw_images, events, make, run
from safetensors.torch import load_file

from lora_trainer.families import family_class

TARGETS = {"alvos_lora": "tudo", "classificacao_lora": 4, "alfa_lora": 8}


FORMATS = [(name, layout) for name in NAMES for layout in family_class(name).formats]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind in KINDED if kind != of(name).tiny.kinds[0]])
def test_every_kind_of_base(tmp_path, capsys, name, kind):
    config = make(tmp_path, name, treino={"epocas": 1})
    words = [f"modelo.{option}={value}" for option, value in written(name, kind)[0].items()]
    assert run(config, *words, "modelo.alvos_lora=atencao+mlp") == 0
    out = capsys.readouterr().out
    assert "pronto:" in out
    assert kind == "all_in_one" or "o modelo base fica como está no arquivo" in out


@pytest.mark.parametrize("name", NAMES)
def test_resume_is_bit_equal(tmp_path, name):
    config = make(tmp_path, name, modelo={"dropout_lora": 0.1}, treino={"media_movel": 0.9})
    assert run(config, "saida.nome=reto") == 0
    assert run(config, "treino.passos_maximos=3") == 0
    assert run(config, "--retomar") == 0
    resumed, straight = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("lora", "reto"))
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert len(events(tmp_path / "saida" / "lora")) == 6


@pytest.mark.parametrize("name", NAMES)
def test_previews_change_nothing(tmp_path, name):
    config = make(tmp_path, name)
    assert run(config, "saida.nome=sem") == 0
    drawn = ['amostras.prompts=["a cat","red"]', "amostras.cada=3", "amostras.passos=2"]
    assert run(config, "saida.nome=com", *drawn) == 0
    without, with_previews = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("sem", "com"))
    assert all(torch.equal(with_previews[key], without[key]) for key in without)
    pictures = sorted(path.name for path in (tmp_path / "saida" / "com" / "amostras").iterdir())
    assert pictures == ["passo-000003.png", "passo-000006.png"]


@pytest.mark.parametrize(("name", "layout"), FORMATS)
def test_a_lora_of_either_layout_is_gone_on_from(tmp_path, name, layout):
    formats = list(family_class(name).formats)
    config = make(tmp_path, name, modelo=TARGETS, saida={"formatos": formats})
    assert run(config) == 0
    first = tmp_path / "saida" / "lora" / f"lora{'' if layout == formats[0] else '-' + layout}.safetensors"
    kept = first.rename(tmp_path / "first.safetensors")
    config = make(tmp_path, name, modelo={**TARGETS, "lora_inicial": str(kept)}, treino={"taxa_aprendizado": 1e-12})
    assert run(config, "saida.nome=outro", "saida.formatos=[diffusers]", "treino.passos_maximos=1") == 0
    before = load_file(tmp_path / "saida" / "lora" / "lora.safetensors") if layout != formats[0] else load_file(kept)
    after = load_file(tmp_path / "saida" / "outro" / "outro.safetensors")
    assert before.keys() == after.keys()
    for key in before:
        if "lora_A" in key:
            product = [s[key.replace("lora_A", "lora_B")] @ s[key] for s in (before, after)]
            assert torch.allclose(*product, atol=1e-6)


LOADED = [name for name in NAMES if hasattr(getattr(diffusers, of(name).tiny.pipeline), "load_lora_weights")]


@pytest.mark.parametrize("name", LOADED)
def test_the_pipeline_loads_the_file(tmp_path, name):
    """Its own load_lora_weights, with rank and alpha that differ."""
    config = make(tmp_path, name, single_file=False, modelo=TARGETS)
    assert run(config) == 0
    tensors = load_file(tmp_path / "saida" / "lora" / "lora.safetensors")
    assert all(key.startswith("transformer.") for key in tensors)
    assert not any("alpha" in key for key in tensors)
    pipeline = open_pipeline(name, tmp_path / "base")
    pipeline.load_lora_weights(str(tmp_path / "saida" / "lora" / "lora.safetensors"))
    layers = {name: m for name, m in pipeline.transformer.named_modules() if hasattr(m, "lora_A")}
    assert len(layers) == len(tensors) // 2
    assert {m.scaling["default_0"] for m in layers.values()} == {1.0}


@pytest.mark.parametrize("name", NAMES)
def test_low_vram_options_run(tmp_path, name):
    draw_images(tmp_path / "fotos")
    config = make(
        tmp_path, name, treino={"checkpoint_gradiente": "sim", "passos_maximos": 2},
        memoria={"quantizacao_base": "nf4", "streaming_blocos": 1.0, "descarga_ativacoes": "sim", "streaming_texto": "sim"},
    )  # fmt: skip
    assert run(config) == 0
