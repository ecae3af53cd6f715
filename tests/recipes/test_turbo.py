"""A distilled base through the real command line: it trains with a LoRA on it that neither previews nor the file have."""

import numpy as np
import pytest
import torch
from helpers import bases
from PIL import Image
from recipe import draw_images, events, run
from safetensors.torch import load_file, save_file
from yaml import safe_dump

DRAWN = {"prompts": ["a cat"], "passos": 1}


@pytest.fixture
def config(tmp_path):
    """A Turbo folder, a training adapter as ai-toolkit writes it, images."""
    modules = bases.of("z_image", "turbo").write_folder(tmp_path / "base")
    draw_images(tmp_path / "fotos")
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, layer in modules["transformer"].named_modules():
        if isinstance(layer, torch.nn.Linear) and name.startswith("layers."):
            for side, shape in (("A", (2, layer.in_features)), ("B", (layer.out_features, 2))):
                tensors[f"diffusion_model.{name}.lora_{side}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    save_file(tensors, tmp_path / "adaptador.safetensors")
    options = {
        "modelo": {"modelo_base": "base", "lora_de_treino": "adaptador.safetensors", "classificacao_lora": 4},
        "dados": {"diretorio_dados": "fotos", "resolucao": 64, "tamanho_lote": 2},
        "treino": {"epocas": 2, "taxa_aprendizado": 1e-2},
        "saida": {"nome": "com", "precisao": "fp32"}, "amostras": DRAWN,
        "sistema": {"semente": 7, "dispositivo": "cpu"},
    }  # fmt: skip
    (tmp_path / "lora.yaml").write_text(safe_dump(options), encoding="utf-8")
    return tmp_path / "lora.yaml"


def test_the_base_wears_it_and_nothing_else_does(config, capsys):
    saved = config.parent / "saida"
    assert run(config) == 0
    out = capsys.readouterr().out
    assert "o modelo base treina com adaptador.safetensors por cima" in out
    assert "undoes" not in out
    assert "desfaz a destilação" not in out
    assert run(config, "modelo.lora_de_treino=null", "saida.nome=sem") == 0
    assert "desfaz a destilação" in capsys.readouterr().out
    with_it, without = (load_file(saved / name / f"{name}.safetensors") for name in ("com", "sem"))
    assert with_it.keys() == without.keys()
    assert any(not torch.equal(with_it[key], without[key]) for key in without), "it was learnt on another base"
    sheets = [np.asarray(Image.open(next((saved / name / "amostras").iterdir()))) for name in ("com", "sem")]
    base_column = slice(0, sheets[0].shape[1] // 2 - 8)
    assert np.array_equal(*(sheet[:, base_column] for sheet in sheets)), "the base's own pictures are drawn without it"
    assert not np.array_equal(*sheets)


def test_it_goes_on_with_the_same_one_only(config, capsys):
    assert run(config, "saida.nome=reto", "amostras.prompts=[]") == 0
    assert run(config, "treino.passos_maximos=2", "amostras.prompts=[]") == 0
    assert run(config, "--retomar", "modelo.lora_de_treino=null", "amostras.prompts=[]") == 2
    assert "lora_de_treino" in capsys.readouterr().err
    moved = (config.parent / "adaptador.safetensors").rename(config.parent / "fotos" / "adaptador.safetensors")
    assert run(config, "--retomar", f"modelo.lora_de_treino={moved}", "amostras.prompts=[]") == 0
    resumed, straight = (load_file(config.parent / "saida" / n / f"{n}.safetensors") for n in ("com", "reto"))
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert len(events(config.parent / "saida" / "com")) == len(events(config.parent / "saida" / "reto"))


def test_a_lora_of_another_family_stops_the_run_before_anything(config, capsys):
    options, _ = bases.written("z_image", "fp32")
    assert run(config, f"modelo.lora_de_treino={options['vae']}") == 2
    assert "não tem camadas LoRA" in capsys.readouterr().err
    assert not (config.parent / "saida" / "com" / "metricas.jsonl").exists()
