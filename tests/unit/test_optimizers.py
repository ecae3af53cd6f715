"""F04: every optimizer works or says why at once; every one resumes bit for bit."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lora_trainer.choices.optimizers import OPTIMIZERS
from lora_trainer.config.schema import TrainingConfig
from lora_trainer.errors import ConfigError, Interrupted, MachineError, set_language
from lora_trainer.optim.averages import evaluation_weights, set_training
from lora_trainer.optim.optimizers import build_optimizer, chosen, optimizer_notices, param_groups, probe
from lora_trainer.optim.resume import load_state
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward

CPU = torch.device("cpu")
ALL = sorted(OPTIMIZERS)
EIGHT_BITS = ["adamw8bit", "lion8bit", "pagedadamw8bit"]


def settings(**changes: object) -> TrainingConfig:
    rate = 1.0 if changes.get("optimizer") == "prodigy" else 1e-2
    return TrainingConfig(**{"learning_rate": rate, **changes})


def weights() -> dict[str, nn.Parameter]:
    """One matrix large enough for 8-bit state, one too small, one of a text encoder."""
    rng = torch.Generator().manual_seed(0)
    shapes = {"unet.a.lora_A": (8, 640), "unet.a.lora_B": (16, 8), "text_encoder.b.lora_A": (8, 64)}
    return {f"{name}.weight": nn.Parameter(torch.randn(shape, generator=rng) / 10) for name, shape in shapes.items()}


def train(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Pull the weights towards 1 with a rate that changes at each step, as the loop does."""
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * (1 - step / 20)
        sum((p - 1).square().sum() for p in named.values()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", ALL)
def test_state_saved_and_loaded_continues_bit_for_bit(name):
    config = settings(optimizer=name)
    straight = weights()
    start = {key: p.detach().clone() for key, p in straight.items()}
    optimizer = build_optimizer(param_groups(straight, config), config)
    train(straight, optimizer, range(6))
    assert all(not torch.equal(p, start[key]) for key, p in straight.items())

    first = weights()
    optimizer = build_optimizer(param_groups(first, config), config)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": {k: p.data for k, p in first.items()}}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = {key: nn.Parameter(value) for key, value in saved["weights"].items()}
    optimizer = build_optimizer(param_groups(second, config), config)
    load_state(optimizer, saved["optimizer"], config)
    train(second, optimizer, range(3, 6))
    for key, p in straight.items():
        assert torch.equal(p, second[key]), key


@pytest.mark.parametrize("name", ALL)
def test_f04_probe_takes_a_real_step_on_the_cpu(name):
    probe(settings(optimizer=name), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "prodigy", "learning_rate": 1e-4},
        {"optimizer": "adamw", "learning_rate": 1e-12},
        {"optimizer": "adamw8bit", "learning_rate": 1e-30, "weight_decay": 0.5},
        {"optimizer": "adamw", "eps": 1.0},
    ],
)
def test_f04_small_steps_are_no_reason_to_refuse_an_optimizer(changes):
    probe(settings(**changes), CPU)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Interrupted])
@pytest.mark.parametrize("where", ["add_param_group", "step"])
def test_an_interruption_is_not_a_broken_optimizer(monkeypatch, stop, where):
    def interrupted(*_args, **_kwargs):
        raise stop("stop")

    monkeypatch.setattr(torch.optim.AdamW, where, interrupted)
    with pytest.raises(stop):
        probe(settings(optimizer="adamw"), CPU)


# -- resuming with another config


def saved_state(**changes: object) -> dict:
    config, named = settings(**changes), weights()
    optimizer = build_optimizer(param_groups(named, config), config)
    train(named, optimizer, range(3))
    return optimizer.state_dict()


def resumed(saved: dict, **changes: object) -> torch.optim.Optimizer:
    config = settings(**changes)
    optimizer = build_optimizer(param_groups(weights(), config), config)
    load_state(optimizer, saved, config)
    return optimizer


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("adamw", {"weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-5}),
        ("adamw8bit", {"weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-5}),
        ("lion8bit", {"weight_decay": 0.3, "betas": [0.8, 0.9]}),
        ("prodigy", {"weight_decay": 0.3, "betas": [0.8, 0.9], "optimizer_args": {"d_coef": 2.0}}),
        ("schedulefree_adamw", {"weight_decay": 0.3, "betas": [0.8, 0.9], "optimizer_args": {"r": 0.5}}),
        ("came", {"weight_decay": 0.3, "optimizer_args": {"eps1": 1e-20}}),
        ("adafactor", {"weight_decay": 0.3, "optimizer_args": {"clip_threshold": 0.5}}),
    ],
)
def test_on_resume_the_config_rules_and_estimates_stay(name, changes):
    saved = saved_state(optimizer=name, lora_plus_ratio=1)
    optimizer = resumed(saved, optimizer=name, learning_rate=0.5, **changes)
    wanted = {key: value for key, value in changes.items() if key != "optimizer_args"}
    wanted |= {"base_lr": 0.5, **changes.get("optimizer_args", {})}
    for old, new in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for key, value in wanted.items():
            if key == "base_lr" and new["name"] == "text_encoder" and name != "prodigy":
                value = 0.25
            assert new[key] == (tuple(value) if isinstance(value, list) else value), key
        for key in {"step", "d", "d_max", "d_numerator", "weight_sum", "lr_max", "train_mode"} & old.keys():
            assert new[key] == old[key], key
    assert optimizer.state_dict()["state"].keys() == saved["state"].keys()


def test_prodigys_estimate_survives_a_change():
    saved = saved_state(optimizer="prodigy")
    assert saved["param_groups"][0]["d"] > 1e-6
    assert resumed(saved, optimizer="prodigy", weight_decay=0.5).param_groups[0]["d"] == saved["param_groups"][0]["d"]


def test_schedule_free_keeps_its_average_under_another_beta():
    config, named = settings(optimizer="schedulefree_adamw"), weights()
    optimizer = build_optimizer(param_groups(named, config), config)
    train(named, optimizer, range(3))
    with evaluation_weights(optimizer):
        average = [p.detach().clone() for p in named.values()]
    changed = settings(optimizer="schedulefree_adamw", betas=[0.7, 0.99])
    later = build_optimizer(param_groups(named, changed), changed)
    load_state(later, optimizer.state_dict(), changed)
    with evaluation_weights(later):
        assert all(torch.allclose(p, x, atol=1e-6) for p, x in zip(named.values(), average, strict=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [("adamw", "adamw8bit"), ("adamw8bit", "lion8bit"), ("adamw", "prodigy"), ("came", "adafactor"),
     ("schedulefree_adamw", "adamw")],
)  # fmt: skip
def test_resume_with_another_optimizer_names_both(old, new):
    with pytest.raises(ConfigError) as caught:
        resumed(saved_state(optimizer=old), optimizer=new)
    assert f"otimizador {old}," in caught.value.problem
    assert caught.value.problem.endswith(f"pede {new}")
    assert caught.value.where == "treino.otimizador"


def test_the_optimizer_really_built_counts_not_the_one_written():
    saved = saved_state(optimizer="adamw")
    config = settings(optimizer="adamw", weight_decay=0.3)
    groups = param_groups(weights(), config)
    optimizer = Optimizer8bit().build(groups, config)
    with pytest.raises(ConfigError, match="adamw, e a configuração pede adamw8bit"):
        load_state(optimizer, saved, config)
    load_state(optimizer, saved_state(optimizer="adamw8bit"), config)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_paging_is_no_other_optimizer():
    optimizer = resumed(saved_state(optimizer="adamw8bit"), optimizer="pagedadamw8bit")
    assert optimizer.state_dict()["param_groups"][0]["optimizer"] == "pagedadamw8bit"


def test_resume_with_other_groups():
    with pytest.raises(ConfigError) as caught:
        resumed(saved_state(), lora_plus_ratio=16)
    assert "unet (2), text_encoder (1)" in caught.value.problem
    assert "unet.lora_B (1)" in caught.value.problem
    assert "razao_lora_plus" in caught.value.where


@pytest.mark.parametrize(
    ("name", "arguments", "missing"),
    [
        ("adamw", {"amsgrad": True}, "max_exp_avg_sq"),
        ("adafactor", {"beta1": 0.9}, "exp_avg"),
        ("came", {"ams_bound": True}, "exp_avg_sq_hat"),
    ],
)
def test_resume_with_arguments_that_need_state_never_kept(name, arguments, missing):
    with pytest.raises(ConfigError) as caught:
        resumed(saved_state(optimizer=name), optimizer=name, optimizer_args=arguments)
    assert missing in caught.value.problem
    assert "argumentos_otimizador" in caught.value.where


def test_the_config_reaches_every_optimizer_in_the_backward_pass():
    config, named = settings(weight_decay=0.3), weights()
    optimizer = OptimizerInBackward().build(param_groups(named, config), config)
    load_state(optimizer, saved_state(weight_decay=0.0), config)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3}
    assert {inner.param_groups[0]["weight_decay"] for inner, _ in optimizer._inner.values()} == {0.3}
    assert all(float(optimizer.state[p]["step"]) == 3 for p in named.values())


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_large_matrices_have_8_bit_state(name):
    config, named = settings(optimizer=name), weights()
    optimizer = build_optimizer(param_groups(named, config), config)
    train(named, optimizer, range(1))
    assert optimizer.state[named["unet.a.lora_A.weight"]]["state1"].dtype == torch.uint8
    assert optimizer.state[named["unet.a.lora_B.weight"]]["state1"].dtype == torch.float32


# -- F04: absent, broken, unusable


def test_f04_package_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.optim", raising=False)
    with pytest.raises(MachineError) as caught:
        probe(settings(optimizer="adamw8bit"), CPU)
    assert "bitsandbytes" in caught.value.problem
    assert "pip install --upgrade" in caught.value.hint
    assert "treino.otimizador: adamw" in caught.value.hint
    assert caught.value.exit_code == 2


def broken_package(folder: Path, monkeypatch: pytest.MonkeyPatch, init: str, optim: str = "") -> None:
    (folder / "bitsandbytes").mkdir()
    (folder / "bitsandbytes" / "__init__.py").write_text(init)
    (folder / "bitsandbytes" / "optim.py").write_text(optim)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))
    # What the test imports must go too, or it would stay after the real modules are put back.
    for name in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


def test_f04_import_that_raises_keeps_the_reason(tmp_path, monkeypatch):
    broken_package(tmp_path, monkeypatch, "raise RuntimeError('libcudart.so.11.0: cannot open shared object file')")
    with pytest.raises(MachineError) as caught:
        probe(settings(optimizer="adamw", use_8bit_optimizer=True), CPU)
    assert "libcudart.so.11.0" in caught.value.problem
    assert "não funciona" in caught.value.problem
    assert isinstance(caught.value.__cause__, RuntimeError)


STUCK = """
import torch
class AdamW8bit(torch.optim.SGD):
    def __init__(self, params, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, lr=lr)
    def step(self, closure=None):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise AttributeError('cadam_8bit_blockwise_grad_fp32')", "cadam_8bit"),
        ("pass", "passo de teste"),
        ("self.param_groups[0]['params'][0].data.sub_(self.param_groups[0]['params'][0].grad)", "passo de teste"),
        ("[p.data.add_(p.grad) for p in self.param_groups[0]['params']]", "passo de teste"),
        ("[p.data.mul_(0.99) for p in self.param_groups[0]['params']]", "passo de teste"),
    ],
)
def test_f04_a_step_that_fails_or_does_nothing(tmp_path, monkeypatch, body, reason):
    broken_package(tmp_path, monkeypatch, "", STUCK.format(body=body))
    with pytest.raises(MachineError) as caught:
        probe(settings(optimizer="adamw8bit"), CPU)
    assert reason in caught.value.problem


def test_missing_extra_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MachineError) as caught:
        probe(settings(optimizer="prodigy"), CPU)
    assert "pytorch_optimizer" in caught.value.problem
    assert 'pip install --upgrade "lora-trainer[otimizadores]"' in caught.value.hint


# -- names and arguments


@pytest.mark.parametrize(
    ("written", "used"), [("adamw", "adamw8bit"), ("pagedadamw8bit", "pagedadamw8bit"), ("lion8bit", "lion8bit")]
)
def test_use_8bit_optimizer(written, used):
    assert chosen(settings(optimizer=written, use_8bit_optimizer=True)).name == used
    assert chosen(settings(optimizer=written)).name == written


@pytest.mark.parametrize("name", ["adafactor", "prodigy", "came", "schedulefree_adamw"])
def test_no_8_bit_version(name):
    with pytest.raises(ConfigError, match="use_otimizador_8bit"):
        chosen(settings(optimizer=name, use_8bit_optimizer=True))


def test_unknown_arguments_are_all_told_with_the_accepted_ones():
    config = settings(optimizer="prodigy", optimizer_args={"d_coeff": 2, "decouple": True, "safeguard_warmup": True})
    with pytest.raises(ConfigError) as caught:
        probe(config, CPU)
    assert "argumentos_otimizador.d_coeff" in caught.value.problem
    assert "argumentos_otimizador.decouple" in caught.value.problem
    assert "safeguard_warmup" not in caught.value.problem
    assert "d_coef" in caught.value.hint
    assert "foreach" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "adafactor", "betas": [0.9, 0.99]}, "treino.betas"),
        ({"optimizer": "adafactor", "eps": 1e-8}, "treino.eps"),
        ({"optimizer": "lion8bit", "eps": 1e-8}, "treino.eps"),
        ({"optimizer": "came", "betas": [0.9, 0.99]}, "treino.betas"),
        ({"optimizer": "adamw", "betas": [0.9, 0.99, 0.9]}, "treino.betas"),
        ({"optimizer": "adamw", "optimizer_args": {"lr": 1.0}}, "argumentos_otimizador.lr"),
        ({"optimizer": "adafactor", "optimizer_args": {"relative_step": True}}, "relative_step"),
        ({"optimizer": "adamw8bit", "optimizer_args": {"optim_bits": 32}}, "optim_bits"),
        ({"optimizer": "prodigy", "text_encoder_learning_rate": 0.5}, "taxa_aprendizado_texto"),
        ({"optimizer": "prodigy", "lora_plus_ratio": 16}, "razao_lora_plus"),
    ],
)
def test_options_an_optimizer_does_not_have(changes, told):
    with pytest.raises(ConfigError) as caught:
        probe(settings(**changes), CPU)
    assert told in caught.value.problem
    assert changes["optimizer"] in caught.value.problem


def test_a_refused_value_keeps_the_librarys_reason():
    with pytest.raises(ConfigError, match="beta parameter"):
        probe(settings(betas=[2.0, 0.9]), CPU)


def test_arguments_reach_the_optimizer():
    config = settings(optimizer="adafactor", weight_decay=0.2, optimizer_args={"eps": [1e-20, 1e-2], "beta1": 0.8})
    defaults = build_optimizer(param_groups(weights(), config), config).defaults
    assert (defaults["weight_decay"], defaults["eps"], defaults["beta1"]) == (0.2, (1e-20, 1e-2), 0.8)
    assert (defaults["scale_parameter"], defaults["relative_step"]) == (False, False)
    config = settings(betas=[0.8, 0.95], eps=1e-6)
    defaults = build_optimizer(param_groups(weights(), config), config).defaults
    assert (defaults["betas"], defaults["eps"]) == ((0.8, 0.95), 1e-6)


# -- groups


def rates(**changes: object) -> dict[str, float]:
    return {group["name"]: group["base_lr"] for group in param_groups(weights(), settings(**changes))}


def test_groups_by_part():
    assert rates() == {"unet": 1e-2, "text_encoder": 5e-3}
    assert rates(text_encoder_learning_rate=1e-5) == {"unet": 1e-2, "text_encoder": 1e-5}
    assert rates(optimizer="prodigy") == {"unet": 1.0, "text_encoder": 1.0}


def test_lora_plus_lifts_b_only():
    assert rates(lora_plus_ratio=16) == pytest.approx({"unet": 1e-2, "unet.lora_B": 0.16, "text_encoder": 5e-3})
    groups = param_groups(weights(), settings(lora_plus_ratio=16))
    assert sum(len(group["params"]) for group in groups) == 3


# -- schedule-free


def test_evaluation_weights_come_and_go_without_a_trace():
    config, named = settings(optimizer="schedulefree_adamw"), weights()
    optimizer = build_optimizer(param_groups(named, config), config)
    train(named, optimizer, range(4))
    before = {key: p.detach().clone() for key, p in named.items()}
    with evaluation_weights(optimizer):
        assert all(not torch.equal(p, before[key]) for key, p in named.items())
        assert not optimizer.param_groups[0]["train_mode"]
    assert all(torch.equal(p, before[key]) for key, p in named.items())
    assert optimizer.param_groups[0]["train_mode"]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "prodigy", "came"])
def test_other_optimizers_have_one_point_only(name):
    config, named = settings(optimizer=name), weights()
    optimizer = build_optimizer(param_groups(named, config), config)
    train(named, optimizer, range(2))
    before = {key: p.detach().clone() for key, p in named.items()}
    set_training(optimizer, False)
    with evaluation_weights(optimizer):
        assert all(torch.equal(p, before[key]) for key, p in named.items())
    set_training(optimizer, True)


# -- notices


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": "prodigy", "learning_rate": 1e-4}, "1.0"),
        ({"optimizer": "adamw", "learning_rate": 1.0}, "muito alta"),
        ({"optimizer": "schedulefree_adamw", "lr_scheduler": "cosine"}, "cosine"),
        ({"optimizer": "pagedadamw8bit"}, "adamw8bit"),
    ],
)
def test_unusual_settings_are_told(changes, told):
    (notice,) = optimizer_notices(settings(**changes), CPU)
    assert told in notice


@pytest.mark.parametrize("name", [name for name in ALL if name != "pagedadamw8bit"])
def test_usual_settings_are_not(name):
    assert optimizer_notices(settings(optimizer=name), CPU) == []


def test_english():
    set_language("en")
    with pytest.raises(ConfigError) as caught:
        probe(settings(optimizer="adamw", optimizer_args={"foo": 1}), CPU)
    assert "training.optimizer_args.foo" in caught.value.problem
