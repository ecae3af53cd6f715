"""Optimizers by name, each a row of a table; what the user wrote is checked against the constructor's own signature.

`probe` takes one real step on a few thousand weights before any data is touched, because only a step tells whether an
8-bit build works here: version texts do not. `load_state` resumes: what was learnt comes from the state, what the user
chooses from the config. Left out: our own optimizers, fused backward (a memory technique).
"""

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..config.optimizers import EIGHT_BIT
from ..config.schema import TrainingConfig
from ..errors import ConfigError, MachineError, t
from ..seam.technique import Groups
from . import ema

# Two lines bitsandbytes prints for everybody: optional CPU kernels it does not need, and paging, said in our own words.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")



@dataclass(frozen=True)
class Recipe:
    """Where an optimizer comes from and what of it the user may set."""

    module: str
    cls: str
    install: str = "torch"
    fixed: dict[str, Any] = field(default_factory=dict)
    """Arguments that are ours to set."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Arguments we set unless the user does."""
    hidden: tuple[str, ...] = ()
    """Arguments that would break the promise of the name."""


_BITS = ("optim_bits", "args", "amsgrad", "is_paged")
_EXTRA = "lora-trainer[otimizadores]"

RECIPES = {
    "adamw": Recipe("torch.optim", "AdamW"),
    "adamw8bit": Recipe("bitsandbytes.optim", "AdamW8bit", "bitsandbytes", hidden=_BITS),
    "pagedadamw8bit": Recipe("bitsandbytes.optim", "PagedAdamW8bit", "bitsandbytes", hidden=_BITS),
    "lion8bit": Recipe("bitsandbytes.optim", "Lion8bit", "bitsandbytes", hidden=_BITS),
    # scale_parameter multiplies the rate by each tensor's size, which for LoRA's zero-initialised B is nearly nothing.
    "adafactor": Recipe(
        "transformers.optimization",
        "Adafactor",
        "transformers",
        fixed={"relative_step": False, "warmup_init": False},
        defaults={"scale_parameter": False},
    ),
    "prodigy": Recipe("pytorch_optimizer", "Prodigy", _EXTRA),
    "came": Recipe("pytorch_optimizer", "CAME", _EXTRA),
    "schedulefree_adamw": Recipe("pytorch_optimizer", "ScheduleFreeAdamW", _EXTRA),
}

ADAPTED = frozenset(
    {"step", "k", "d", "d0", "d_max", "d_hat", "d_numerator", "d_de_nom", "weight_sum", "lr_max", "train_mode"}
)
"""What optimizers count and estimate in their groups. d0 too: Prodigy's sums are in units of it."""
_SAME_STATE = {"pagedadamw8bit": "adamw8bit"}
"""Optimizers that differ only in where their state lies."""
_PROBE_RATE = 1e-3



def resolve_name(settings: TrainingConfig) -> str:
    """The optimizer in fact used: `use_8bit_optimizer: yes` turns adamw into adamw8bit; auto is the planner's to settle."""
    if settings.use_8bit_optimizer != "yes":
        return settings.optimizer
    if settings.optimizer in EIGHT_BIT:
        return EIGHT_BIT[settings.optimizer]
    raise ConfigError(
        t(pt=f"{settings.optimizer} não tem versão de 8 bits", en=f"{settings.optimizer} has no 8-bit version"),
        t(
            pt=f"retire treino.use_otimizador_8bit, ou use treino.otimizador com um destes: {', '.join(EIGHT_BIT)}",
            en=f"remove training.use_8bit_optimizer, or set training.optimizer to one of: {', '.join(EIGHT_BIT)}",
        ),
        where=_key("use_otimizador_8bit", "use_8bit_optimizer"),
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
    # Prodigy scales one estimated rate; half of it for the text encoders would be ignored without a word.
    return settings.learning_rate if settings.optimizer == "prodigy" else settings.learning_rate / 2


def build_optimizer(groups: Groups, settings: TrainingConfig) -> torch.optim.Optimizer:
    """Raises ConfigError for arguments the optimizer does not know, MachineError when its package is not usable.

    Each group is marked with the optimizer's name, which travels with the state to load_state.
    """
    name = resolve_name(settings)
    cls = _import(name)
    arguments = _arguments(name, cls, settings)
    if name == "adamw" and _on_cards(groups) and not arguments.keys() & {"fused", "foreach"}:
        arguments["fused"] = True  # PyTorch's own choice there holds temporaries as large as all parameters
    try:
        with unset_fake_temporarily():  # bitsandbytes makes tables of real values
            optimizer: torch.optim.Optimizer = cls(groups, lr=settings.learning_rate, **arguments)
    except Exception as error:  # each library refuses values with exceptions of its own
        raise ConfigError(
            t(pt=f"{name} recusou os valores dados: {error}", en=f"{name} refused the values given: {error}"),
            t(pt=f"valores: {arguments}", en=f"values: {arguments}"),
            where=_key("argumentos_otimizador", "optimizer_args"),
        ) from error
    for group in optimizer.param_groups:
        group["optimizer"] = name
    if settings.ema:
        ema.attach(optimizer, settings.ema)
    return optimizer


def _on_cards(groups: Groups) -> bool:
    return all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])


def _import(name: str) -> Callable[..., torch.optim.Optimizer]:
    recipe = RECIPES[name]
    try:
        cls: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module(recipe.module), recipe.cls)
    except Exception as error:  # a broken binary package may raise anything when imported
        raise _unusable(name, error) from error
    return cls


def _unusable(name: str, error: Exception) -> MachineError:
    recipe = RECIPES[name]
    package = recipe.module.partition(".")[0]
    reason = f"{type(error).__name__}: {error}"
    absent = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
    if absent:
        problem = t(
            pt=f"o otimizador {name} precisa do pacote {package}, que não está instalado ({reason})",
            en=f"the optimizer {name} needs the package {package}, which is not installed ({reason})",
        )
    else:
        problem = t(
            pt=f"o otimizador {name} não funciona nesta máquina: {reason}",
            en=f"the optimizer {name} does not work on this machine: {reason}",
        )
    install = f'python -m pip install --upgrade "{recipe.install}"'
    hint = t(
        pt=f"{install}; ou use treino.otimizador: adamw",
        en=f"{install}; or set training.optimizer: adamw",
    )
    if name in EIGHT_BIT.values():
        hint += t(
            pt=" com treino.use_otimizador_8bit: false (6 bytes de memória a mais por parâmetro do LoRA)",
            en=" with training.use_8bit_optimizer: false (6 more bytes of memory per LoRA parameter)",
        )
    return MachineError(problem, hint, where=_key("otimizador", "optimizer"))


def _arguments(name: str, cls: Callable[..., Any], settings: TrainingConfig) -> dict[str, Any]:
    """Constructor arguments from the options; all that do not fit are told at once."""
    recipe, given = RECIPES[name], dict(settings.optimizer_args)
    signature = inspect.signature(cls).parameters
    named = {"weight_decay": settings.weight_decay, "betas": settings.betas, "eps": settings.eps}
    own = {"params", "lr", *named, *recipe.fixed, *recipe.hidden, "maximize", "differentiable"}
    if name == "adafactor":
        own.remove("eps")  # a pair, which the option of that name cannot say
    accepted = [p.name for p in signature.values() if p.kind is not p.VAR_KEYWORD and p.name not in own]
    chosen = {key: value for key, value in named.items() if value is not None}
    problems = [_unknown(key, "argumentos_otimizador", "optimizer_args") for key in given if key not in accepted]
    problems += [_unknown(key, key, key) for key in chosen if key not in signature]
    problems += _wrong_length(chosen, signature) + _one_rate_only(name, settings)
    if problems:
        raise ConfigError(
            t(pt=f"{name} não aceita: {'; '.join(problems)}", en=f"{name} does not accept: {'; '.join(problems)}"),
            t(
                pt=f"argumentos_otimizador de {name}: {', '.join(accepted)}",
                en=f"optimizer_args of {name}: {', '.join(accepted)}",
            ),
            where=_key("otimizador", "optimizer"),
        )
    merged = {**recipe.defaults, **chosen, **given, **recipe.fixed}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in merged.items()}


def _unknown(name: str, pt: str, en: str) -> str:
    place = _key(pt, en)
    return place if name == pt else f"{place}.{name}"


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
                    pt=f"{_key(key, key)} com {count} valor(es), são {len(wanted)} (usual: {wanted})",
                    en=f"{_key(key, key)} of {count} value(s), it takes {len(wanted)} (usual: {wanted})",
                )
            )
    return problems


def _one_rate_only(name: str, settings: TrainingConfig) -> list[str]:
    """pytorch_optimizer's Prodigy reads the first group's rate and ignores the others in silence."""
    if name != "prodigy":
        return []
    problems = []
    if settings.text_encoder_learning_rate not in (None, settings.learning_rate):
        problems.append(_key("taxa_aprendizado_texto", "text_encoder_learning_rate"))
    if settings.lora_plus_ratio != 1:
        problems.append(_key("razao_lora_plus", "lora_plus_ratio"))
    return problems


def _key(pt: str, en: str) -> str:
    return t(pt=f"treino.{pt}", en=f"training.{en}")


def optimizer_notices(settings: TrainingConfig, device: torch.device) -> list[str]:
    """What is allowed but rarely meant."""
    name, rate = resolve_name(settings), settings.learning_rate
    notices = []
    if name == "prodigy" and not 0.1 <= rate <= 10:
        notices.append(
            t(
                pt=f"prodigy acha a taxa sozinho e espera taxa_aprendizado: 1.0; com {rate:g} quase não aprende",
                en=f"prodigy finds the rate by itself and expects learning_rate: 1.0; with {rate:g} it hardly learns",
            )
        )
    if name != "prodigy" and rate >= 0.1:
        notices.append(
            t(
                pt=f"taxa_aprendizado: {rate:g} é muito alta para {name}; o usual é de 1e-5 a 1e-2",
                en=f"learning_rate: {rate:g} is very high for {name}; 1e-5 to 1e-2 is usual",
            )
        )
    if name == "schedulefree_adamw" and settings.lr_scheduler != "constant":
        notices.append(
            t(
                pt=f"schedulefree_adamw dispensa curva de taxa; agendador: {settings.lr_scheduler} soma-se a ele",
                en=f"schedulefree_adamw needs no schedule; lr_scheduler: {settings.lr_scheduler} comes on top of it",
            )
        )
    if name == "pagedadamw8bit" and device.type == "cpu":
        notices.append(
            t(pt="pagedadamw8bit na CPU é o mesmo que adamw8bit", en="pagedadamw8bit on the CPU is just adamw8bit")
        )
    return notices


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
    name = resolve_name(settings)
    try:
        optimizer.step()
        steps = torch.stack([weight.detach() for weight in weights.values()]).cpu().double()
    except Exception as error:  # unusable binaries fail here, each in its own way
        raise _unusable(name, error) from error
    downhill = -(steps * slope.cpu()).sum(dim=(1, 2))
    if not torch.isfinite(steps).all() or not bool((downhill > 0).all()):
        reason = t(pt="um passo de teste não deu pesos utilizáveis", en="a test step gave no usable weights")
        raise _unusable(name, RuntimeError(reason))


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
        ema.forget(optimizer)


def _refuse_other_optimizer(before: Groups, ours: str) -> None:
    theirs = str(before[0].get("optimizer", "?")) if before else ours
    if _SAME_STATE.get(ours, ours) == _SAME_STATE.get(theirs, theirs):
        return
    raise ConfigError(
        t(
            pt=f"o estado salvo é do otimizador {theirs}, e a configuração pede {ours}",
            en=f"the saved state is of the optimizer {theirs}, and the config asks for {ours}",
        ),
        t(
            pt=f"para retomar, use {theirs}; para trocar, comece outro treino com modelo.lora_inicial no LoRA já salvo",
            en=f"to resume, use {theirs}; to change it, start a new training with model.initial_lora on the LoRA saved",
        ),
        where=_key("otimizador", "optimizer"),
    )


def _refuse_other_groups(before: Groups, groups: Groups) -> None:
    theirs, ours = (
        ", ".join(f"{group.get('name', '?')} ({len(group['params'])})" for group in some) for some in (before, groups)
    )
    if theirs == ours:
        return
    raise ConfigError(
        t(
            pt=f"o estado salvo tem os grupos de parâmetros {theirs}; a configuração dá {ours}",
            en=f"the saved state has the parameter groups {theirs}; the config gives {ours}",
        ),
        t(
            pt="retome com a mesma razao_lora_plus e os mesmos alvos do LoRA, ou comece um treino novo",
            en="resume with the same lora_plus_ratio and the same LoRA targets, or start a new training",
        ),
        where=_key("razao_lora_plus", "lora_plus_ratio"),
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
                raise _other_arguments(resolve_name(settings), missing)


def _flat_keys(state: Mapping[str, Any]) -> Iterator[str]:
    """bitsandbytes keeps part of a parameter's state one level down in its state_dict."""
    for key, value in state.items():
        yield from _flat_keys(value) if isinstance(value, Mapping) else (key,)


def _other_arguments(name: str, missing: list[str]) -> ConfigError:
    return ConfigError(
        t(
            pt=f"o estado salvo foi feito por {name} com outros argumentos: nele falta {', '.join(missing)}",
            en=f"the saved state was made by {name} with other arguments: it lacks {', '.join(missing)}",
        ),
        t(
            pt="retome com os argumentos_otimizador de antes, ou comece um treino novo",
            en="resume with the optimizer_args of before, or start a new training",
        ),
        where=_key("argumentos_otimizador", "optimizer_args"),
    )


def _move_training_point(optimizer: torch.optim.Optimizer, old_betas: list[Any]) -> None:
    """Where schedule-free trains depends on beta1: under another one, the same average has another training point."""
    new_betas: list[Any] = [group.get("betas") for group in optimizer.param_groups]
    if not hasattr(optimizer, "eval") or all(a[0] == b[0] for a, b in zip(old_betas, new_betas, strict=True)):
        return
    for group, betas in zip(optimizer.param_groups, old_betas, strict=True):
        group["betas"] = betas
    set_training(optimizer, False)
    for group, betas in zip(optimizer.param_groups, new_betas, strict=True):
        group["betas"] = betas
    set_training(optimizer, True)


def set_training(optimizer: torch.optim.Optimizer, training: bool) -> None:
    """Schedule-free optimizers hold one point to train at and another to use; the others hold one for both."""
    switch = getattr(optimizer, "train" if training else "eval", None)
    if switch is not None:
        switch()


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The weights to validate, preview and export with; training weights come back bit for bit afterwards."""
    if not hasattr(optimizer, "eval"):
        with ema.averaged(optimizer):
            yield
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.detach().clone() for p in params]
    try:
        set_training(optimizer, False)
        yield
    finally:
        set_training(optimizer, True)
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)
