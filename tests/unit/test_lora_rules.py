"""`regras_lora`: rank, alpha and learning rate of some layers, by regular expression."""

from pathlib import Path

import pytest
import torch
from adapter_models import MODELS, SD15, forward, perturb, pipeline, sd15_model
from torch import nn

from lora_trainer.adapters import check_targets, find_targets, inject
from lora_trainer.config.loading import load
from lora_trainer.config.schema import ModelConfig, TrainingConfig
from lora_trainer.errors import ConfigError, ErrorReport, set_language
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.optim.optimizers import build_optimizer, load_state, param_groups

RULES = [
    {"target": r"attn2\.to_[qk]$", "rank": 2, "rate": 1e-5},
    {"target": r"attn2", "rank": 8, "alpha": 2.0},
    {"target": r"resnets", "rate": 3e-4},
]
BLOCK = "unet.mid_block.attentions.0.transformer_blocks.0"


def adapted(**settings):
    model = sd15_model()
    return model, inject(model, SD15, ModelConfig(lora_rank=4, lora_alpha=2, **{"lora_rules": RULES, **settings}), 0)


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_ranks_and_strengths(kind):
    """Alpha follows the rank where no rule gives it; the first rule that says something counts."""
    _, adapter = adapted(adapter_kind=kind, lora_targets="all")
    modules = adapter.modules()
    found = {name: (modules[f"{BLOCK}.{name}"].rank, modules[f"{BLOCK}.{name}"].alpha) for name in
             ("attn1.to_q", "attn2.to_q", "attn2.to_v")}  # fmt: skip
    assert found == {"attn1.to_q": (4, 2.0), "attn2.to_q": (2, 2.0), "attn2.to_v": (8, 2.0)}
    alone = adapted(lora_rules=RULES[:1], lora_targets="all", conv_rank=2, rslora=True)[1].export()
    assert alone[f"{BLOCK}.attn2.to_q"].scale == pytest.approx(alone[f"{BLOCK}.attn1.to_q"].scale)
    assert alone["unet.mid_block.resnets.0.conv1"].rank == 2


def test_rates_become_groups():
    _, adapter = adapted(lora_targets="all", train_text_encoder=True)
    settings = TrainingConfig(learning_rate=1e-4)
    named = adapter.named_parameters()
    groups = param_groups(named, settings, adapter.rates)
    assert {group["name"]: group["lr"] for group in groups} == {
        "unet": 1e-4, "unet 1e-05": 1e-5, "unet 0.0003": 3e-4, "text_encoder": 5e-5,
    }  # fmt: skip
    of = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(of) == len(named)
    assert of[id(named[f"{BLOCK}.attn2.to_k.lora_A.weight"])] == 1e-5
    assert of[id(named[f"{BLOCK}.attn2.to_v.lora_A.weight"])] == 1e-4
    assert all(group["base_lr"] == group["lr"] for group in groups)
    plus = param_groups(named, settings.model_copy(update={"lora_plus_ratio": 4}), adapter.rates)
    assert {group["name"]: group["lr"] for group in plus}["unet 1e-05.lora_B"] == pytest.approx(4e-5)
    factors = adapted(adapter_kind="loha", lora_targets="all")[1]
    assert "unet 1e-05" in {g["name"] for g in param_groups(factors.named_parameters(), settings, factors.rates)}


def test_a_state_is_not_loaded_into_other_groups():
    _, adapter = adapted(lora_targets="all")
    settings, named = TrainingConfig(), adapter.named_parameters()
    with_rules = build_optimizer(param_groups(named, settings, adapter.rates), settings)
    without = build_optimizer(param_groups(named, settings), settings)
    with pytest.raises(ConfigError, match="grupos de parâmetros"):
        load_state(without, with_rules.state_dict(), settings)


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_the_pipeline_reads_every_rank(layout, tmp_path):
    model, adapter = adapted(lora_targets="all", train_text_encoder=True)
    perturb(adapter)
    path = save_adapter(adapter, SD15, tmp_path / "x.safetensors", layout, "fp32", {})
    assert verify(model, adapter, SD15, path, forward).output_difference < 1e-4
    fresh = sd15_model()
    pipeline("sd15", fresh).load_lora_weights(str(path))
    with torch.no_grad():
        assert (forward(fresh) - forward(model)).abs().max() < 1e-4 * forward(model).abs().max()


def test_a_rule_without_layers_names_those_near():
    for language, told in (("pt", "nenhuma das camadas de alvos_lora"), ("en", "none of the layers of lora_targets")):
        set_language(language)
        with pytest.raises(ConfigError, match=told) as error:
            find_targets(sd15_model(), SD15, ModelConfig(lora_rules=[{"target": r"attn2\.to_query", "rank": 4}]))
        assert "attnN.to_q" in error.value.hint
        assert error.value.where == ("modelo.regras_lora" if language == "pt" else "model.lora_rules")
    with pytest.raises(ConfigError, match="resnets"):  # a layer that alvos_lora leaves out
        adapted()


def test_parts_of_one_matrix_need_one_rank():
    class Fused:
        lora_targets = SD15.lora_targets
        text_targets = SD15.text_targets
        title = "X"

        def export_prefixes(self):
            return {"unet": "lora_unet"}

        def kohya_slots(self, path):
            from lora_trainer.seam.slots import Slot

            stem, _, leaf = path.rpartition(".")
            index = {"to_q": 0, "to_k": 1, "to_v": 2}.get(leaf)
            return Slot(path) if index is None else Slot(f"{stem}.qkv", index, (16, 16, 16))

        def load_model(self, device, dtype, *, with_text=False):
            with device:
                return nn.ModuleDict({"unet": sd15_model()["unet"]})

    rules = [{"target": r"attn2\.to_q$", "rank": 8}]
    with pytest.raises(ConfigError, match="uma só matriz"):
        check_targets(Fused(), ModelConfig(lora_rules=rules), ["kohya"])
    check_targets(Fused(), ModelConfig(lora_rules=rules), ["diffusers"])
    check_targets(Fused(), ModelConfig(lora_rules=[{"target": r"attn2\.to_[qkv]$", "rank": 8}]), ["kohya"])


# -- as written


def loaded(folder: Path, rules: str, *more: str):
    path = folder / "meu.yaml"
    path.write_text(f"modelo:\n  modelo_base: dono/nome\n{rules}\ndados: {{diretorio_dados: .}}\n", encoding="utf-8")
    return load(path, more)


def test_both_languages_and_lines(tmp_path):
    expected = [{"target": "attn2", "rank": 32, "alpha": 16.0}, {"target": "ff", "rate": 5e-5}]
    pt = "  regras_lora:\n    - {alvo: attn2, rank: 32, alfa: 16}\n    - alvo: ff\n      taxa: 5e-5"
    en = "  lora_rules: [{target: attn2, rank: '32', alpha: 16}, {target: ff, rate: 5e-5}]"
    assert loaded(tmp_path, pt).config.model.lora_rules == expected
    assert loaded(tmp_path, en).config.model.lora_rules == expected
    assert loaded(tmp_path, "  regras_lora: {alvo: attn2, rank: 32, alfa: 16}").config.model.lora_rules == expected[:1]
    (only,) = loaded(tmp_path, "", "modelo.regras_lora=[{alvo: ff, taxa: 1e-4}]").config.model.lora_rules
    assert only == {"target": "ff", "rate": 1e-4}


@pytest.mark.parametrize(
    "rule", ["{alvo: a}", "{rank: 4}", "{alvo: a, posto: 4}", "{alvo: a, rank: 0}", "{alvo: a, rank: 2.5}", "{alvo: a, rank: 4096}",
             "{alvo: a, taxa: -1}", "{alvo: a, taxa: 50}", "{alvo: a, taxa: muita}",
             "{alvo: '', rank: 4}", "attn2", "{alvo: a, target: b, rank: 3}"],
)  # fmt: skip
def test_what_is_no_rule(rule, tmp_path):
    with pytest.raises(ErrorReport) as error:
        loaded(tmp_path, f"  regras_lora:\n    - {{alvo: b, rank: 3}}\n    - {rule}")
    assert "regras com alvo e ao menos um de rank, alfa, taxa" in str(error.value)
    assert "meu.yaml:5" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["modelo.regras_lora=[{alvo: 'a(', rank: 3}]"], "expressão regular inválida"),
        (["modelo.regras_lora=[{alvo: a, taxa: 1}]", "treino.otimizador=prodigy"], "prodigy usa uma só"),
        (["modelo.tipo_adaptador=loha", "modelo.dora=sim"], "não anda com `modelo.dora`"),
        (["modelo.tipo_adaptador=lokr", "treino.razao_lora_plus=4"], "matriz B do LoRA"),
        (["modelo.inicializacao_lora=pissa", "modelo.tipo_adaptador=loha"], "começa de outro jeito"),
        (["modelo.inicializacao_lora=pissa", "modelo.dora=sim"], "norma do peso inteiro"),
        (["modelo.inicializacao_lora=pissa", "modelo.dropout_lora=0.1"], "parte do próprio modelo base"),
        (["modelo.inicializacao_lora=pissa", "modelo.lora_inicial=x.safetensors"], "dois começos"),
    ],
)
def test_what_does_not_go_together(settings, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.safetensors").touch()
    with pytest.raises(ErrorReport, match=told):
        loaded(tmp_path, "", *settings)


def test_a_factor_for_other_kinds_is_told(tmp_path):
    (notice,) = loaded(tmp_path, "", "modelo.fator_lokr=8").notices
    assert "`modelo.fator_lokr` não tem efeito sem `modelo.tipo_adaptador: lokr`" in notice


def test_sdxl_too():
    model, family = MODELS["sdxl"][0](), MODELS["sdxl"][1]
    adapter = inject(model, family, ModelConfig(lora_rank=4, lora_rules=[{"target": "^unet.down", "rank": 2}]), 0)
    assert {m.rank for path, m in adapter.export().items() if path.startswith("unet.down")} == {2}
    assert {m.rank for path, m in adapter.export().items() if not path.startswith("unet.down")} == {4}
