"""Options of the objective through the real command line: dropped captions, noise levels and their weights, the average."""

import torch
from recipe import events, make, run
from safetensors.torch import load_file

from lora_trainer.journal.checkpoint import load_state


def file_of(folder, name="lora"):
    return load_file(folder / "saida" / name / f"{name}.safetensors")


def weights_of(folder, name="lora"):
    state = load_state(folder / "saida" / name / "estado")
    assert state is not None
    return state.adapter


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_dropped_caption_is_an_empty_one(tmp_path):
    """From the cache, or encoded while training: captions all dropped against captions all empty."""
    config = make(tmp_path, "chroma", treino={"epocas": 1})
    assert run(config, "saida.nome=dropped", "dados.descarte_legendas=1") == 0
    assert run(config, "saida.nome=live", "dados.descarte_legendas=1", "dados.cache_codificador_texto=nao") == 0
    for caption in (tmp_path / "fotos").glob("*.txt"):
        caption.write_text("", encoding="utf-8")
    assert run(config, "saida.nome=empty") == 0
    dropped, live, empty = (file_of(tmp_path, name) for name in ("dropped", "live", "empty"))
    assert same(dropped, empty)
    assert live.keys() == empty.keys()
    assert all(torch.allclose(live[key], value, atol=1e-5) for key, value in empty.items())


def test_the_file_holds_the_average_until_it_is_switched_off(tmp_path):
    """With captions of unlike length in a batch, and levels and weights that are not the usual ones."""
    config = make(
        tmp_path, "chroma", modelo={"classificacao_lora": 4, "alfa_lora": 4}, dados={"descarte_legendas": 0.5},
        treino={"amostragem_passo_ruido": "moda", "peso_niveis": "cosmap", "deslocamento_passo_ruido": 0, "media_movel": 0.9},
    )  # fmt: skip
    assert run(config, "treino.passos_maximos=3") == 0
    assert not same(weights_of(tmp_path), file_of(tmp_path))
    assert run(config, "--retomar", "treino.passos_maximos=4", "treino.media_movel=0") == 0
    assert same(weights_of(tmp_path), file_of(tmp_path))
    assert len(events(tmp_path / "saida" / "lora")) == 4
