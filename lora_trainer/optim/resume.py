"""Going on from a saved optimizer's state: what was learnt comes from it, what the user chooses from the config."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..choices.optimizers import OPTIMIZERS
from ..config.names import shown
from ..config.schema import TrainingConfig
from ..errors import ConfigError
from ..seam.technique import Groups
from . import averages
from .optimizers import build_optimizer, chosen

ADAPTED = frozenset(
    {"step", "k", "d", "d0", "d_max", "d_hat", "d_numerator", "d_de_nom", "weight_sum", "lr_max", "train_mode"}
)
"""What optimizers count and estimate in their groups. d0 too: Prodigy's sums are in units of it."""


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], settings: TrainingConfig) -> None:
    """Go on from `saved` (a state_dict) with a freshly built optimizer, under the config's present hyper-parameters.

    ConfigError, before anything is changed, if the state is of another optimizer or of other groups of parameters.
    """
    fresh = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    before, name = saved["param_groups"], fresh[0]["optimizer"]
    settings = settings.model_copy(update={"optimizer": name})  # a memory technique may have made it the 8-bit one
    _refuse_other_optimizer(before, name)
    _refuse_other_groups(before, optimizer.param_groups)
    _refuse_missing_state(optimizer, saved, settings)
    merged = [
        {**old, **{key: value for key, value in new.items() if key not in ADAPTED}}
        for old, new in zip(before, fresh, strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": merged})
    _move_training_point(optimizer, [group.get("betas") for group in before])
    if not settings.ema:
        averages.forget(optimizer)


def _refuse_other_optimizer(before: Groups, ours: str) -> None:
    theirs = str(before[0].get("optimizer", "?")) if before else ours
    if theirs == ours or (theirs in OPTIMIZERS and OPTIMIZERS[theirs].state == OPTIMIZERS[ours].state):
        return
    raise ConfigError.said(
        pt=f"o estado salvo é do otimizador {theirs}, e a configuração pede {ours}",
        en=f"the saved state is of the optimizer {theirs}, and the config asks for {ours}",
        hint_pt=f"para retomar, use {theirs}; para trocar, comece outro treino com modelo.lora_inicial no LoRA já salvo",
        hint_en=f"to resume, use {theirs}; to change it, start a new training with model.initial_lora on the LoRA saved",
        where=shown("training", "optimizer"),
    )


def _refuse_other_groups(before: Groups, groups: Groups) -> None:
    theirs, ours = (
        ", ".join(f"{group.get('name', '?')} ({len(group['params'])})" for group in some) for some in (before, groups)
    )
    if theirs == ours:
        return
    raise ConfigError.said(
        pt=f"o estado salvo tem os grupos de parâmetros {theirs}; a configuração dá {ours}",
        en=f"the saved state has the parameter groups {theirs}; the config gives {ours}",
        hint_pt="retome com a mesma razao_lora_plus e os mesmos alvos do LoRA, ou comece um treino novo",
        hint_en="resume with the same lora_plus_ratio and the same LoRA targets, or start a new training",
        where=shown("training", "lora_plus_ratio"),
    )


def _refuse_missing_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], settings: TrainingConfig) -> None:
    """Arguments such as amsgrad ask for state that a run without them never kept; one step of a twin tells which."""
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        kinds = {
            frozenset(_flat_keys(saved["state"][number])): parameter
            for number, parameter in zip(old["params"], group["params"], strict=True)
            if saved["state"].get(number)  # empty where the optimizer was only asked, before its first step
        }
        for kept, parameter in kinds.items():
            twin = nn.Parameter(torch.zeros_like(parameter))
            twin.grad = torch.ones_like(twin)
            # an average may start with any step
            single = build_optimizer([{"params": [twin], "lr": group["lr"]}], settings.model_copy(update={"ema": 0.0}))
            single.step()
            if missing := sorted(set(_flat_keys(single.state[twin])) - kept):
                raise _other_arguments(chosen(settings).name, missing)


def _flat_keys(state: Mapping[str, Any]) -> Iterator[str]:
    """bitsandbytes keeps part of a parameter's state one level down in its state_dict."""
    for key, value in state.items():
        yield from _flat_keys(value) if isinstance(value, Mapping) else (key,)


def _other_arguments(name: str, missing: list[str]) -> ConfigError:
    return ConfigError.said(
        pt=f"o estado salvo foi feito por {name} com outros argumentos: nele falta {', '.join(missing)}",
        en=f"the saved state was made by {name} with other arguments: it lacks {', '.join(missing)}",
        hint_pt="retome com os argumentos_otimizador de antes, ou comece um treino novo",
        hint_en="resume with the optimizer_args of before, or start a new training",
        where=shown("training", "optimizer_args"),
    )


def _move_training_point(optimizer: torch.optim.Optimizer, old_betas: list[Any]) -> None:
    """Where schedule-free trains depends on beta1: under another one, the same average has another training point."""
    new_betas: list[Any] = [group.get("betas") for group in optimizer.param_groups]
    if not hasattr(optimizer, "eval") or all(a[0] == b[0] for a, b in zip(old_betas, new_betas, strict=True)):
        return
    for group, betas in zip(optimizer.param_groups, old_betas, strict=True):
        group["betas"] = betas
    averages.set_training(optimizer, False)
    for group, betas in zip(optimizer.param_groups, new_betas, strict=True):
        group["betas"] = betas
    averages.set_training(optimizer, True)
