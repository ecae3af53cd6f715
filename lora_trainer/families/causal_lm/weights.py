"""A causal language model of transformers, built on meta and filled tensor by tensor, as its own loader would fill it.

transformers keeps the differences between checkpoints and modules in conversion mappings (old names, experts stored one by
one). They are asked here for the place of each parameter; reading, casting, packing and moving are those of bases/weights.py,
so that a base quantised or streamed is never held whole. What no file holds (rotary frequencies, scales of embeddings) is
made by the model's own initialisation, in its own precision.

Two modules are swapped, both for memory: a head tied to the embeddings becomes a view of them, and experts fused into one
tensor become linear layers again, so that they can be packed. Left out: checkpoints that are quantised already.
"""

import inspect
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...bases import weights as _weights
from ...bases.weights import Weights
from ...engine.assign import assign
from ...engine.host import is_fake
from ...engine.tracker import host_memory
from ...errors import SourceError, t
from . import attention

UNFILLED = {True: float("nan"), False: -(2**40)}
"""What stands in a buffer until its module has filled it: by whether it is floating."""


class TiedLinear(nn.Linear):
    """A head whose weight is the embeddings': it holds none of its own."""

    def __init__(self, embeddings: nn.Module, head: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.__dict__["_embeddings"] = embeddings  # not a child: its weight is not ours
        self.bias = head.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return cast(Tensor, self.holder.weight)

    @property
    def home(self) -> torch.device:
        """Where the embeddings live; no attribute where that is the model's own device."""
        return cast(torch.device, self.holder.home)

    @property
    def holder(self) -> Any:
        """The embeddings; under an adapter on them, the layer that has their weight."""
        embeddings = self.__dict__["_embeddings"]
        return getattr(embeddings, "base_layer", embeddings)


class ExpertLinears(nn.Module):
    """What transformers' fused experts compute, from one linear layer for each matrix: they can be packed and streamed."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        count, rows, width = fused.gate_up_proj.shape
        self.act_fn, self.count = fused.act_fn, count
        for number in range(count):  # named as in the files: experts.0.gate_proj
            expert = {
                "gate_proj": _linear(width, rows // 2, fused.gate_up_proj),
                "up_proj": _linear(width, rows // 2, fused.gate_up_proj),
                "down_proj": _linear(rows // 2, width, fused.gate_up_proj),
            }
            self.add_module(str(number), nn.ModuleDict(expert))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Hidden states (T, D), each token's experts and their shares (T, K) -> (T, D)."""
        out = torch.zeros_like(hidden_states)
        for number, token, place in self._routes(top_k_index):
            expert: Any = self._modules[str(number)]
            x = hidden_states[token]
            y = expert["down_proj"](self.act_fn(expert["gate_proj"](x)) * expert["up_proj"](x))
            out = out.index_add(0, token, (y * top_k_weights[token, place, None]).to(out.dtype))
        return out

    def _routes(self, top_k_index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Expert, its tokens, and which of their choices it was. Fake choices all fall on one expert: the same sizes."""
        if is_fake(top_k_index):
            yield 0, top_k_index.flatten(), top_k_index.flatten()
            return
        for number in top_k_index.unique().tolist():
            if number < self.count:
                token, place = torch.where(top_k_index == number)
                yield number, token, place


def _linear(wide: int, high: int, like: Tensor) -> nn.Linear:
    """Without a bias and without an initialisation, which on meta costs the most: a mixture has ten thousand of them."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = wide, high
    layer.weight = nn.Parameter(like.new_empty(high, wide), requires_grad=False)
    layer.register_parameter("bias", None)
    return layer


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model on meta, frozen, its attention ours; SourceError for architectures that cannot be trained so."""
    from transformers import AutoModelForCausalLM

    attention.register()
    config = deepcopy(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION, dtype=dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_plain_fused(child):
                setattr(parent, name, ExpertLinears(child))
    _tie(model)
    model.config.use_cache = False
    return cast(nn.Module, model.eval().requires_grad_(False))


def _is_plain_fused(module: nn.Module) -> bool:
    """Whether these experts compute just what Qwen3-MoE's do."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    if not type(module).__name__.endswith("Experts") or set(module._parameters) != {"gate_up_proj", "down_proj"}:
        return False
    ours, theirs = (inspect.unwrap(kind.forward) for kind in (Qwen3MoeExperts, type(module)))
    return inspect.getsource(ours) == inspect.getsource(theirs)


def _tie(model: Any) -> None:
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embeddings.weight:
        model.set_output_embeddings(TiedLinear(embeddings, head))


@dataclass
class Places:
    """Where the parameters of a model lie in its files."""

    plain: dict[str, str] = field(default_factory=dict)
    """Parameter -> key."""
    converted: dict[str, Any] = field(default_factory=dict)
    """First parameter that a conversion of transformers' makes -> the conversion, knowing its keys."""
    unused: list[str] = field(default_factory=list)

    def filled(self) -> set[str]:
        return {*self.plain, *(name for first, each in self.converted.items() for name in _targets(first, each))}


def find_places(model: Any, weights: Weights, what: str) -> Places:
    """Every parameter and stored buffer has its place, of the right shape; SourceError if not."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    renamings = [each for each in mapping if not isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted, places = model.state_dict(), Places()
    for key in sorted(weights.header, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted and pattern is not None:
            name, pattern = _of_one_expert(key, name, by_pattern[pattern].source_patterns.index(pattern)), None
        if name not in wanted:
            places.unused.append(key)
        elif pattern is None:
            places.plain[name] = key
        else:
            each = places.converted.setdefault(name, deepcopy(by_pattern[pattern]))
            each.add_tensor(name, key, pattern, lambda key=key: weights.value(key))
    _swap_tied(model, weights, places)
    _check(model, weights, places, what)
    return places


def is_untied(model: Any, weights: Weights) -> bool:
    """Whether the files hold a head of its own where the config ties it to the embeddings: then the files are right."""
    keys = _tied_keys(model)
    if keys is None or not all(key in weights for key in keys):
        return False
    with host_memory():
        return not torch.equal(*(weights.read(key) for key in keys))


def _tied_keys(model: Any) -> tuple[str, str] | None:
    """The usual keys of the embeddings and of the head that is tied to them."""
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    if not isinstance(head, TiedLinear):
        return None
    return f"{names[model.get_input_embeddings()]}.weight", f"{names[head]}.weight"


def _swap_tied(model: Any, weights: Weights, places: Places) -> None:
    """Some files hold the shared weight under the head's name only."""
    keys = _tied_keys(model)
    if keys is None:
        return
    embeddings, head = keys
    if embeddings not in places.plain and head in weights:
        places.plain[embeddings] = head
    places.unused = [key for key in places.unused if key != head]


def _of_one_expert(key: str, fused: str, place: int) -> str:
    """The linear layer of ExpertLinears whose weight transformers would put into a fused tensor, as its `place`-th part."""
    parent, _, leaf = fused.rpartition(".")
    number = re.search(r"\.experts\.(\d+)\.", key)
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
    if number is None or place >= len(parts):
        return fused
    return f"{parent}.{number[1]}.{parts[place]}.weight"


def _targets(first: str, conversion: Any) -> list[str]:
    lead, *others = conversion.target_patterns
    return [first, *(first.replace(lead, other) for other in others)]


def _check(model: Any, weights: Weights, places: Places, what: str) -> None:
    wanted = model.state_dict()
    missing = sorted(wanted.keys() - places.filled())
    bare = {name: weights.header[key].shape for name, key in places.plain.items()}
    misshapen = [
        f"{name} {list(s)} ≠ {list(wanted[name].shape)}" for name, s in bare.items() if s != wanted[name].shape
    ]
    unreadable = [k for k in places.plain.values() if weights.header[k].dtype not in _weights.DTYPES]
    problems = [
        text + ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        for names, text in (
            (missing, t(pt=f"faltam {len(missing)} tensores: ", en=f"{len(missing)} tensors are missing: ")),
            (misshapen, t(pt="tensores de outro formato: ", en="tensors of another shape: ")),
            (unreadable, t(pt="tensores de um tipo que não leio: ", en="tensors of a type I do not read: ")),
        )
        if names
    ]
    if problems:
        raise SourceError(
            t(pt="os pesos não são os que config.json descreve: ", en="the weights are not those of config.json: ")
            + "; ".join(problems),
            t(
                pt="a pasta está incompleta ou mistura dois modelos: baixe-a de novo",
                en="the folder is incomplete or mixes two models: download it again",
            ),
            what,
        )


def fill(model: Any, weights: Weights, places: Places, device: torch.device, dtype: torch.dtype) -> None:
    """Read everything into a skeleton, in the order of the files, holding one tensor (or one conversion) more."""
    fill_buffers(model, device)
    order = {key: number for number, key in enumerate(weights.header)}
    for name, key in sorted(places.plain.items(), key=lambda pair: order[pair[1]]):
        with host_memory():
            value = weights.value(key)
        _assign(model, name, value, device, dtype)
    for first, conversion in places.converted.items():
        with host_memory(), torch.no_grad():
            made = deepcopy(conversion).convert(first, model=model, config=model.config)
        for name, value in made.items():
            _assign(model, name, value[0] if isinstance(value, list) else value, device, dtype)
    left = [name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta]
    assert not left, f"left on meta: {left[:4]}"


def _assign(model: Any, name: str, value: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    strict = model._keep_in_fp32_modules_strict or ()
    half = model._keep_in_fp32_modules or () if dtype is torch.float16 else ()
    parts = name.split(".")
    dtype = torch.float32 if any(part in (*strict, *half) for part in parts) else dtype
    assign(model, name, value, device, dtype if value.is_floating_point() else value.dtype)


@torch.no_grad()
def fill_buffers(model: Any, device: torch.device) -> None:
    """Buffers that no file holds, by the initialisation of the module that owns them (its weights are on meta still)."""
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if (b := module._buffers[n]) is not None and b.is_meta]
        if not names or hasattr(module, "pack_weight"):
            continue
        for name in names:
            old = module._buffers[name]
            module._buffers[name] = torch.full(old.shape, UNFILLED[old.is_floating_point()], dtype=old.dtype)
        model._init_weights(module)
        for name in names:
            made = cast(Tensor, module._buffers[name])
            unfilled = made.isnan() if made.is_floating_point() else made == UNFILLED[False]
            assert not bool(unfilled.any()), f"{path}.{name}: made by no initialisation that I know"
            module._buffers[name] = made.to(getattr(module, "home", device))
