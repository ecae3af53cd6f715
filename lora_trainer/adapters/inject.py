"""Putting adapters on a frozen model, and their start.

peft supplies LoRA's layers, layers.py those of LoHa and LoKr; this module owns their start. Every random matrix is drawn on
the CPU from (seed, module path) alone, so it depends neither on what ran before, nor on the device or dtype of the base, nor
on which other layers are adapted. Adapter weights are float32 on any base: in half precision, updates at usual learning
rates would round away. Left out: peft's other initialisations (OLoRA, …), which change the base that a file is loaded onto.
"""

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import t
from ..layouts import read_tensors
from ..seam.family import Family
from . import pissa
from .adapter import NAME, Adapter, Layer
from .layers import LAYERS, AdaptedLayer, LokrLayer, is_whole
from .targets import Strength, find_targets, strengths


def inject(
    model: nn.ModuleDict, family: Family, settings: ModelConfig, seed: int, formats: Collection[str] = ("kohya",)
) -> Adapter:
    """Freeze the model and put fresh adapters, which change nothing yet, on the layers that `settings` names.

    `formats` are the files to be written: layers that their readers would not find again are refused.
    """
    model.requires_grad_(False)
    paths = find_targets(model, family, settings, formats)
    strong = strengths(model, paths, settings)
    layers = _add_lora(model, strong, settings) if settings.adapter_kind == "lora" else _add_own(model, strong, settings)
    for path, layer in layers.items():
        if isinstance(layer, AdaptedLayer):
            _start_own(path, layer, seed)
        else:
            _start(path, layer, seed)
    if settings.lora_init == "pissa":
        _start_principal(layers, seed, _fastest(model))
    unet_config = getattr(model["unet"], "config", None) if "unet" in model else None
    per_block = getattr(unet_config, "layers_per_block", 2)
    adapter = Adapter(layers, family, per_block if isinstance(per_block, int) else 2)
    adapter.rates = {path: strength.rate for path, strength in strong.items() if strength.rate is not None}
    return adapter


def check_targets(family: Family, settings: ModelConfig, formats: Collection[str] = ("kohya",)) -> list[str]:
    """Before anything is loaded: lora_targets finds layers that the files can carry, and initial_lora fits them. Notices."""
    if settings.initial_lora:
        check_initial_file(Path(settings.initial_lora), family, settings, formats)
    model = _skeleton(family, settings)
    paths = find_targets(model, family, settings, formats)
    notices = _without_alpha(model, strengths(model, paths, settings), settings) if settings.adapter_kind == "lokr" else []
    return [*notices, *([_unread_dora()] if settings.dora and "kohya" in formats and "diffusers" not in formats else [])]


def _unread_dora() -> str:
    """No two readers of kohya files agree on DoRA (layouts/kohya.py); the diffusers layout is exact."""
    dora, formats = shown("model", "dora"), shown("output", "formats")
    return t(
        pt=f"`{dora}` num arquivo kohya não é lido igual por todos: o diffusers ignora o DoRA, o A1111 e o ComfyUI o "
        f"calculam com outra norma; acrescente diffusers a `{formats}`, formato em que é exato no diffusers",
        en=f"`{dora}` in a kohya file is not read alike by all: diffusers ignores DoRA, A1111 and ComfyUI compute it with "
        f"another norm; add diffusers to `{formats}`, a format in which it is exact in diffusers",
    )


def _without_alpha(model: nn.ModuleDict, strong: Mapping[str, Strength], settings: ModelConfig) -> list[str]:
    modules, factor = dict(model.named_modules()), settings.lokr_factor
    whole = [path for path, each in strong.items() if is_whole(modules[path].weight.shape, each.rank, factor)]
    if not any(strong[path].scale(settings) != 1 for path in whole):
        return []
    return [
        t(
            pt=f"LoKr: em {len(whole)} de {len(strong)} camadas o rank já dá uma matriz inteira, e nelas alfa não conta; para que "
            "conte, diminua classificacao_lora ou fator_lokr",
            en=f"LoKr: in {len(whole)} of {len(strong)} layers the rank already makes a whole matrix, where alpha does not "
            "count; for it to count, lower lora_rank or lokr_factor",
        )
    ]


def check_initial_file(
    path: Path, family: Family, settings: ModelConfig, formats: Collection[str] = ("kohya",)
) -> None:
    """Before anything is loaded: `path` is whole and finite, and fits the adapter that `settings` describes."""
    if path.is_file():
        read_tensors(path)  # what is wrong with the file itself is told first
    inject(_skeleton(family, settings), family, settings, 0, formats).read_fitting(path)


def _skeleton(family: Family, settings: ModelConfig) -> nn.ModuleDict:
    return family.load_model(torch.device("meta"), torch.float16, with_text=settings.train_text_encoder)


# -- layers


def _add_lora(model: nn.ModuleDict, strong: Mapping[str, Strength], settings: ModelConfig) -> dict[str, Layer]:
    with torch.random.fork_rng(devices=[]):  # peft draws matrices of its own, which are replaced afterwards
        inject_adapter_in_model(_peft_config(strong, settings), model, adapter_name=NAME)
    modules = dict(model.named_modules())
    layers: dict[str, Layer] = {}
    for path in strong:
        layer = modules[path]
        assert isinstance(layer, LoraLayer), path
        layers[path] = layer
    return layers


def _peft_config(strong: Mapping[str, Strength], settings: ModelConfig) -> LoraConfig:
    rank = settings.lora_rank
    alpha = float(rank if settings.lora_alpha is None else settings.lora_alpha)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(strong),
        lora_dropout=settings.lora_dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        rank_pattern={re.escape(path): each.rank for path, each in strong.items() if each.rank != rank},
        alpha_pattern={re.escape(path): each.alpha for path, each in strong.items() if each.alpha != alpha},
    )


def _add_own(model: nn.ModuleDict, strong: Mapping[str, Strength], settings: ModelConfig) -> dict[str, Layer]:
    layers: dict[str, Layer] = {}
    extra = {"factor": settings.lokr_factor} if settings.adapter_kind == LokrLayer.kind else {}
    for path, strength in strong.items():
        parent, _, name = path.rpartition(".")
        base = model.get_submodule(path)
        scale = strength.scale(settings)
        layer = LAYERS[settings.adapter_kind](base, strength.rank, scale, settings.lora_dropout, **extra)
        layer.train(base.training)
        setattr(model.get_submodule(parent), name, layer)
        layers[path] = layer
    return layers


# -- start


def _generator(text: str) -> torch.Generator:
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def _start(path: str, layer: LoraLayer, seed: int) -> None:
    """B = 0, A uniform in ±1/sqrt(fan in) as in the LoRA authors' code (Kaiming with a = √5), all float32."""
    for group in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
        if NAME in group:
            group[NAME].to(torch.float32)
    _draw(layer.lora_A[NAME].weight, _generator(f"{seed}/{path}"))
    layer.lora_B[NAME].weight.zero_()


def _start_principal(layers: Mapping[str, Layer], seed: int, device: torch.device | None) -> None:
    for layer in layers.values():
        pissa.prepare(layer, NAME)
    for path, layer in layers.items():
        pissa.start(layer, NAME, _generator(f"{seed}/{path}"), device)


@torch.no_grad()
def _start_own(path: str, layer: AdaptedLayer, seed: int) -> None:
    """One factor zero, the others as LyCORIS draws them."""
    for name, factor in layer.factors().items():
        if name == layer.zero:
            factor.zero_()
        else:
            _draw(factor, _generator(f"{seed}/{path}.{name}"), layer.deviations.get(name))


def _draw(weight: Tensor, generator: torch.Generator, deviation: float | None = None) -> None:
    fresh = torch.empty(weight.shape)
    if deviation is None:
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
    else:
        fresh.normal_(std=deviation, generator=generator)
    weight.copy_(fresh)


def _fastest(model: nn.Module) -> torch.device | None:
    """A card that holds part of the model; streamed layers still lie in host memory."""
    return next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
