"""Building the optimizer the user chose (choices/optimizers.py); what is set is checked against its own signature.

`probe` takes one real step on a few thousand weights before any data is touched, because only a step tells whether an
8-bit build works here: version texts do not. Left out: our own optimizers, fused backward (a memory technique).
"""

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..choices.optimizers import OPTIMIZERS, WITH_8BIT, Optimizer
from ..config.names import shown
from ..config.schema import TrainingConfig
from ..errors import ConfigError, MachineError, t
from ..seam.technique import Groups
from . import averages

# Two lines bitsandbytes prints for everybody: optional CPU kernels it does not need, and paging, said in our own words.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")

_PROBE_RATE = 1e-3
_OURS = ("params", "lr", "maximize", "differentiable")


def chosen(settings: TrainingConfig) -> Optimizer:
    """The optimizer in fact used: `use_8bit_optimizer: yes` turns adamw into adamw8bit; auto is the planner's to settle."""
    row = OPTIMIZERS[settings.optimizer]
    if settings.use_8bit_optimizer != "yes":
        return row
    if row.eight_bit:
        return OPTIMIZERS[row.eight_bit]
    others = ", ".join(WITH_8BIT)
    raise ConfigError.said(
        pt=f"{row.name} não tem versão de 8 bits",
        en=f"{row.name} has no 8-bit version",
        hint_pt=f"retire treino.use_otimizador_8bit, ou use treino.otimizador com um destes: {others}",
        hint_en=f"remove training.use_8bit_optimizer, or set training.optimizer to one of: {others}",
        where=shown("training", "use_8bit_optimizer"),
    )


def param_groups(
    named: Mapping[str, nn.Parameter], settings: TrainingConfig, rates: Mapping[str, float] | None = None
) -> Groups:
    """Adapter parameters by path (`unet.….lora_A.weight`) -> groups with `name`, `lr`, and `base_lr` for schedules.

    Text encoders have their own rate, and so may have modules (`rates`, by module path). LoRA+ (Hayou et al. 2024) gives
    the B matrices `lora_plus_ratio` times the rate.
    """
    groups: dict[str, dict[str, Any]] = {}
    for path, parameter in named.items():
        part = path.partition(".")[0]
        rate, label = _part_rate(part, settings), part
        if rates and (own := _own_rate(path, rates)) is not None:
            rate, label = own, f"{part} {own:g}"
        if settings.lora_plus_ratio != 1 and ".lora_B." in path:
            rate, label = rate * settings.lora_plus_ratio, f"{label}.lora_B"
        group = groups.setdefault(label, {"params": [], "name": label, "lr": rate, "base_lr": rate})
        group["params"].append(parameter)
    return list(groups.values())


def _own_rate(path: str, rates: Mapping[str, float]) -> float | None:
    """Of the module that a parameter belongs to; matrices that are modules themselves lie one level deeper."""
    module = path.rpartition(".")[0]
    return rates.get(module, rates.get(module.rpartition(".")[0]))


def _part_rate(part: str, settings: TrainingConfig) -> float:
    if not part.startswith("text_encoder"):
        return settings.learning_rate
    if settings.text_encoder_learning_rate is not None:
        return settings.text_encoder_learning_rate
    # Where one estimated rate is scaled, half of it for the text encoders would be ignored without a word.
    return settings.learning_rate if OPTIMIZERS[settings.optimizer].finds_rate else settings.learning_rate / 2


def build_optimizer(groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Raises ConfigError for arguments the optimizer does not know, MachineError when its package is not usable.

    Each group is marked with the optimizer's name, which travels with the state to resume.load_state.
    """
    row = chosen(settings)
    cls = _import(row)
    arguments = _arguments(row, cls, settings)
    if row.fused and _on_cards(groups) and not arguments.keys() & {"fused", "foreach"}:
        arguments["fused"] = True
    try:
        with unset_fake_temporarily():  # bitsandbytes makes tables of real values
            optimizer: torch.optim.Optimizer = cls(groups, lr=settings.learning_rate, **arguments)
    except Exception as error:  # each library refuses values with exceptions of its own
        raise ConfigError(
            t(pt=f"{row.name} recusou os valores dados: {error}", en=f"{row.name} refused the values given: {error}"),
            t(pt=f"valores: {arguments}", en=f"values: {arguments}"),
            where=shown("training", "optimizer_args"),
        ) from error
    for group in optimizer.param_groups:
        group["optimizer"] = row.name
    if settings.ema:
        averages.attach(optimizer, settings.ema)
    return optimizer


def _on_cards(groups: Groups) -> bool:
    return all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])


def _import(row: Optimizer) -> Callable[..., torch.optim.Optimizer]:
    try:
        cls: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(row.module), row.cls)
    except Exception as error:  # a broken binary package may raise anything when imported
        raise _unusable(row, error) from error
    return cls


def _unusable(row: Optimizer, error: Exception) -> MachineError:
    name, package, reason = row.name, row.package, f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
        problem = t(
            pt=f"o otimizador {name} precisa do pacote {package}, que não está instalado ({reason})",
            en=f"the optimizer {name} needs the package {package}, which is not installed ({reason})",
        )
    else:
        problem = t(
            pt=f"o otimizador {name} não funciona nesta máquina: {reason}",
            en=f"the optimizer {name} does not work on this machine: {reason}",
        )
    hint = f'python -m pip install --upgrade "{row.install}"'
    hint += t(pt="; ou use treino.otimizador: adamw", en="; or set training.optimizer: adamw")
    if row.is_8bit:
        hint += t(
            pt=" com treino.use_otimizador_8bit: false (6 bytes de memória a mais por parâmetro do LoRA)",
            en=" with training.use_8bit_optimizer: false (6 more bytes of memory per LoRA parameter)",
        )
    return MachineError(problem, hint, where=shown("training", "optimizer"))


def _arguments(row: Optimizer, cls: Callable[..., Any], settings: TrainingConfig) -> dict[str, Any]:
    """Constructor arguments from the options; all that do not fit are told at once."""
    given, signature = dict(settings.optimizer_args), inspect.signature(cls).parameters
    named = {"weight_decay": settings.weight_decay, "betas": settings.betas, "eps": settings.eps}
    own = {*_OURS, *named, *row.fixed, *row.hidden}.difference(row.beyond_options)
    accepted = [p.name for p in signature.values() if p.kind is not p.VAR_KEYWORD and p.name not in own]
    chosen = {key: value for key, value in named.items() if value is not None}
    problems = [f"{shown('training', 'optimizer_args')}.{key}" for key in given if key not in accepted]
    problems += [shown("training", key) for key in chosen if key not in signature]
    problems += _wrong_length(chosen, signature) + (_other_rates(settings) if row.finds_rate else [])
    if problems:
        raise ConfigError.said(
            pt=f"{row.name} não aceita: {'; '.join(problems)}",
            en=f"{row.name} does not accept: {'; '.join(problems)}",
            hint_pt=f"argumentos_otimizador de {row.name}: {', '.join(accepted)}",
            hint_en=f"optimizer_args of {row.name}: {', '.join(accepted)}",
            where=shown("training", "optimizer"),
        )
    merged = {**row.defaults, **chosen, **given, **row.fixed}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in merged.items()}


def _wrong_length(chosen: dict[str, Any], signature: Mapping[str, inspect.Parameter]) -> list[str]:
    """`betas` of another length, or one number where the optimizer wants a pair."""
    problems = []
    for key, value in chosen.items():
        usual = signature[key].default if key in signature else None
        count = len(value) if isinstance(value, list) else 1
        if isinstance(usual, tuple) and len(usual) != count:
            wanted = list(usual)
            problems.append(
                t(
                    pt=f"{shown('training', key)} com {count} valor(es), são {len(wanted)} (usual: {wanted})",
                    en=f"{shown('training', key)} of {count} value(s), it takes {len(wanted)} (usual: {wanted})",
                )
            )
    return problems


def _other_rates(settings: TrainingConfig) -> list[str]:
    """pytorch_optimizer's Prodigy reads the first group's rate and ignores the others in silence."""
    own_rate = settings.text_encoder_learning_rate not in (None, settings.learning_rate)
    asked = {"text_encoder_learning_rate": own_rate, "lora_plus_ratio": settings.lora_plus_ratio != 1}
    return [shown("training", name) for name, holds in asked.items() if holds]


def optimizer_notices(settings: TrainingConfig, device: torch.device) -> list[str]:
    """What is allowed but rarely meant."""
    row, rate, curve = chosen(settings), settings.learning_rate, settings.lr_scheduler
    name, on_cpu = row.name, device.type == "cpu"
    told = {
        t(
            pt=f"{name} acha a taxa sozinho e espera taxa_aprendizado: 1.0; com {rate:g} quase não aprende",
            en=f"{name} finds the rate by itself and expects learning_rate: 1.0; with {rate:g} it hardly learns",
        ): row.finds_rate and not 0.1 <= rate <= 10,
        t(
            pt=f"taxa_aprendizado: {rate:g} é muito alta para {name}; o usual é de 1e-5 a 1e-2",
            en=f"learning_rate: {rate:g} is very high for {name}; 1e-5 to 1e-2 is usual",
        ): rate >= 0.1 and not row.finds_rate,
        t(
            pt=f"{name} dispensa curva de taxa; agendador: {curve} soma-se a ele",
            en=f"{name} needs no schedule; lr_scheduler: {curve} comes on top of it",
        ): row.averages and curve != "constant",
        t(pt=f"{name} na CPU é o mesmo que {row.unpaged}", en=f"{name} on the CPU is just {row.unpaged}"): row.unpaged and on_cpu,
    }  # fmt: skip
    return [line for line, holds in told.items() if holds]


def probe(settings: TrainingConfig, device: torch.device) -> None:
    """One real step, large enough for 8-bit state (4096 elements and up); raises ConfigError or MachineError.

    From zero and at a rate of its own: a step of the user's may be below what float32 resolves beside a larger weight,
    and from zero weight decay moves nothing, so that all movement is the optimizer's answer to the gradient.
    """
    names = ("unet.probe.lora_A.weight", "unet.probe.lora_B.weight")
    weights = {name: nn.Parameter(torch.zeros(64, 128, device=device)) for name in names}
    slope = torch.linspace(-1, 1, 64 * 128, device=device).view(64, 128)
    for weight in weights.values():
        weight.grad = slope.clone()
    optimizer = build_optimizer(param_groups(weights, settings), settings)
    for group in optimizer.param_groups:
        group["lr"] = _PROBE_RATE
    try:
        optimizer.step()
        steps = torch.stack([weight.detach() for weight in weights.values()]).cpu().double()
    except Exception as error:  # unusable binaries fail here, each in its own way
        raise _unusable(chosen(settings), error) from error
    downhill = -(steps * slope.cpu()).sum(dim=(1, 2))
    if not torch.isfinite(steps).all() or not bool((downhill > 0).all()):
        reason = t(pt="um passo de teste não deu pesos utilizáveis", en="a test step gave no usable weights")
        raise _unusable(chosen(settings), RuntimeError(reason))
