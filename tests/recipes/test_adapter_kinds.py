"""LoHa, LoKr, PiSSA and rules through the real command line: files proved, resumed bit for bit, gone on from."""

import json

import pytest
import torch
from recipe import draw_images, events, make, run
from safetensors import safe_open
from safetensors.torch import load_file

KINDS = {
    "loha": {"tipo_adaptador": "loha"},
    "lokr": {"tipo_adaptador": "lokr", "fator_lokr": 4},
    "pissa": {"inicializacao_lora": "pissa"},
    "rules": {"regras_lora": [{"alvo": "to_q", "rank": 2, "taxa": 1e-3}, {"alvo": "to_v", "alfa": 1}]},
}
LAST = {"loha": "hada_w2_a", "lokr": "lokr_w2_b", "pissa": "weight", "rules": "weight"}


def made(tmp_path, name, kind, **sections):
    targets = {"alvos_lora": "tudo"} if kind in ("loha", "lokr") else {}
    modelo = {"classificacao_lora": 2, "alfa_lora": 4, **targets, **KINDS[kind], **sections.pop("modelo", {})}
    return make(tmp_path, name, modelo=modelo, **sections)


@pytest.mark.parametrize(("name", "kind"), [("sd1", "loha"), ("flux", "lokr"), ("sd1", "pissa"), ("flux", "rules")])
def test_resume_is_bit_equal_and_the_file_is_proved(tmp_path, capsys, name, kind):
    dropout = {} if kind == "pissa" else {"dropout_lora": 0.1}
    config = made(tmp_path, name, kind, modelo=dropout, treino={"media_movel": 0.9, "epocas": 2})
    assert run(config, "saida.nome=reto") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("releitura própria" in out) == (kind in ("loha", "lokr"))
    assert run(config, "treino.passos_maximos=2") == 0
    assert run(config, "--retomar") == 0
    resumed, straight = (load_file(tmp_path / "saida" / n / f"{n}.safetensors") for n in ("lora", "reto"))
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[key], straight[key]) for key in straight)
    assert any(bool(tensor.any()) for key, tensor in straight.items() if key.endswith(LAST[kind]))
    rows = events(tmp_path / "saida" / "reto")
    assert rows[-1]["loss"] < rows[0]["loss"] * 1.5


@pytest.mark.parametrize(
    ("name", "layout", "kind"), [("sd1", "kohya", "loha"), ("flux", "diffusers", "loha"), ("flux", "kohya", "lokr")]
)
def test_a_file_is_gone_on_from(tmp_path, name, layout, kind):
    config = made(tmp_path, name, kind, saida={"formatos": [layout]}, treino={"epocas": 1})
    assert run(config) == 0
    ending = "" if (name, layout) != ("flux", "kohya") else "-kohya"
    kept = (tmp_path / "saida" / "lora" / f"lora{ending}.safetensors").rename(tmp_path / "first.safetensors")
    again = ["saida.nome=outro", f"modelo.lora_inicial={kept}", "treino.taxa_aprendizado=1e-12", "treino.passos_maximos=1"]
    assert run(config, *again) == 0
    before, after = load_file(kept), load_file(tmp_path / "saida" / "outro" / f"outro{ending}.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)
    starts = {"sd1": "lora_unet_", "flux": "lycoris_" if layout == "kohya" else "transformer."}
    assert all(key.startswith(starts[name]) for key in before)
    assert any(key.endswith(".alpha") for key in before) == (layout == "kohya")
    with safe_open(kept, "pt") as file:
        assert json.loads(file.metadata()["ss_network_args"])["algo"] == kind


def test_the_pissa_file_is_gone_on_from_as_a_lora_of_twice_the_rank(tmp_path):
    config = made(tmp_path, "sd1", "pissa", treino={"epocas": 1})
    assert run(config) == 0
    kept = (tmp_path / "saida" / "lora" / "lora.safetensors").rename(tmp_path / "first.safetensors")
    words = ["saida.nome=outro", f"modelo.lora_inicial={kept}", "treino.passos_maximos=1", "modelo.classificacao_lora=4"]
    assert run(config, *words) == 2
    assert run(config, *words, "modelo.inicializacao_lora=padrao") == 0


def test_low_vram_options_run(tmp_path):
    draw_images(tmp_path / "fotos")
    config = made(
        tmp_path, "flux", "pissa", treino={"checkpoint_gradiente": "sim", "passos_maximos": 2},
        memoria={"quantizacao_base": "nf4", "streaming_blocos": 1.0, "descarga_ativacoes": "sim", "streaming_texto": "sim"},
    )  # fmt: skip
    assert run(config) == 0


def test_a_rule_without_layers_stops_before_anything_is_written(tmp_path, capsys):
    config = make(tmp_path, modelo={"regras_lora": [{"alvo": "to_query", "rank": 4}]})
    assert run(config) == 2
    assert "attnN.to_q" in capsys.readouterr().err
    assert not list((tmp_path / "saida").rglob("*.safetensors"))
