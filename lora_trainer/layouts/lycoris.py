"""LoHa and LoKr as plain tensors, and their files: `….hada_w1_a`, `….lokr_w1`, as LyCORIS names and flattens them.

A kohya file calls modules as kohya does in UNets and text encoders (A1111, Forge and ComfyUI read it) and `lycoris_…` with
diffusers' module names in transformers, where ComfyUI and Forge know the place of each part of a fused matrix. A diffusers
file has the module paths themselves, the scale folded in; ComfyUI reads it too, and diffusers the LoKr of its newest
families. A LoKr of two whole factors has no scale (readers ignore its alpha). Left out: Tucker forms (`hada_t1`, `lokr_t2`)
and DoRA on top, which are refused by name.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import SourceError, t
from . import kohya
from .lora import portable_path
from .read import damaged, is_kohya, name_lines, read_as_float32, refuse_other_kinds

TITLES = {"loha": "LoHa", "lokr": "LoKr"}
_MARKS = {"loha": "hada_w1_a", "lokr": "lokr_w1"}
_ROLES = {
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
}
_SCALED = ("hada_w2_a", "lokr_w2", "lokr_w2_b")
"""The factor that takes up a scale."""
TRANSFORMER = "lycoris"
"""Prefix of a transformer's modules in kohya files."""


@dataclass(frozen=True)
class LycorisModule:
    """`factors` by their names in files; `rank` of the low-rank form, also where this module has none."""

    factors: dict[str, Tensor]
    scale: float
    rank: int

    @property
    def alpha(self) -> float:
        """What readers divide by the rank to get the scale."""
        return self.scale * self.rank

    def delta(self) -> Tensor:
        """Change of the weight: (out, in) or (out, in · kh · kw)."""
        factors = {name: factor.float() for name, factor in self.factors.items()}
        if "hada_w1_a" in factors:
            w1_a, w1_b, w2_a, w2_b = (factors[name] for name in _ROLES["loha"])
            return self.scale * (w1_a @ w1_b) * (w2_a @ w2_b)
        return self.scale * torch.kron(_whole(factors, "lokr_w1"), _whole(factors, "lokr_w2").flatten(1).contiguous())

    def with_scale(self, scale: float) -> "LycorisModule":
        """The same effect under another scale; the difference goes into one factor."""
        name = next(name for name in _SCALED if name in self.factors)
        factors = {**self.factors, name: self.factors[name] * (self.scale / scale)}
        return replace(self, factors=factors, scale=scale)

    def balanced(self) -> "LycorisModule":
        """The same effect with factors of about equal size; powers of two move between them: nothing is rounded."""
        sizes = {name: float(factor.abs().max()) for name, factor in self.factors.items()}
        if not all(sizes.values()):
            return self
        mean = sum(math.log2(size) for size in sizes.values()) / len(sizes)
        shifts = {name: round(mean - math.log2(size)) for name, size in sizes.items()}
        shifts[next(iter(shifts))] -= sum(shifts.values())
        return replace(self, factors={name: factor * 2.0 ** shifts[name] for name, factor in self.factors.items()})


def _whole(factors: Mapping[str, Tensor], name: str) -> Tensor:
    return factors[name] if name in factors else factors[f"{name}_a"] @ factors[f"{name}_b"].flatten(1)


Lycoris = dict[str, LycorisModule]
"""Module path -> its LoHa or LoKr."""


@dataclass(frozen=True)
class LycorisFile:
    lora: Lycoris
    strangers: list[str]
    metadata: dict[str, str]


# -- writing


def pack(lycoris: Lycoris, prefixes: Mapping[str, str], layout: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path, module in lycoris.items():
        folded = layout == "diffusers"
        name = portable_path(path) if folded else kohya_name(path, prefixes)
        module = module.with_scale(1.0) if folded else module
        tensors |= {f"{name}.{role}": factor for role, factor in module.factors.items()}
        if not folded:
            tensors[f"{name}.alpha"] = torch.tensor(module.alpha)
    return tensors


def kohya_name(path: str, prefixes: Mapping[str, str]) -> str:
    return kohya.module_name(path, {**prefixes, "transformer": TRANSFORMER})


def network_facts(lycoris: Lycoris, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """As LyCORIS's own trainer says it: `ss_network_args` tells the algorithm. `shapes` of the layers' weights."""
    kind = "loha" if "hada_w1_a" in next(iter(lycoris.values())).factors else "lokr"
    wide = {path: module for path, module in lycoris.items() if math.prod(shapes[path][2:]) > 1}
    rank, alpha = _commonest({path: module for path, module in lycoris.items() if path not in wide} or lycoris)
    arguments: dict[str, str] = {"algo": kind}
    if wide:
        arguments |= dict(zip(("conv_dim", "conv_alpha"), map(_number, _commonest(wide)), strict=True))
    return {
        "ss_network_module": "lycoris.kohya",
        "ss_network_dim": rank,
        "ss_network_alpha": _number(alpha),
        "ss_network_args": arguments,
    }


def _commonest(lycoris: Lycoris) -> tuple[int, float]:
    return Counter((m.rank, round(m.alpha, 6)) for m in lycoris.values()).most_common(1)[0][0]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


# -- reading


def read_lycoris(
    path: Path, paths: list[str], prefixes: Mapping[str, str], layers_per_block: int = 2, kind: str = "loha"
) -> LycorisFile:
    """A file of this kind, in float32. `paths`: the module paths the model can take; `prefixes`: part -> kohya prefix."""
    tensors, metadata = read_as_float32(path, lambda stored: _refuse_others(stored, kind, path))
    spelled = {name: each for each in paths for name in _spellings(each, prefixes)}
    find = _finder(spelled, layers_per_block if is_kohya(tensors) else 0)
    found: dict[str, dict[str, Tensor]] = {}
    strangers = set()
    for key, tensor in tensors.items():
        name, _, role = key.rpartition(".")
        place = find(name)
        if place and role in (*_ROLES[kind], "alpha"):
            found.setdefault(place, {})[role] = tensor
        else:
            strangers.add(name or key)
    try:
        modules = {place: _module(parts, kind) for place, parts in found.items() if parts.keys() - {"alpha"}}
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise damaged(path, error) from error  # tensors that are not what their names say
    return LycorisFile(modules, sorted(strangers), metadata)


def kind_of(names: Iterable[str]) -> str:
    """lora, loha or lokr, by the keys of a file."""
    ends = {name.rpartition(".")[2] for name in names}
    return next((kind for kind, roles in _ROLES.items() if ends & set(roles)), "lora")


def _spellings(path: str, prefixes: Mapping[str, str]) -> list[str]:
    part, _, rest = path.partition(".")
    own = [path, portable_path(path), kohya_name(path, prefixes), kohya.module_name(path, prefixes)]
    if part not in ("unet", "transformer"):
        return own
    flat = rest.replace(".", "_")
    bare = [rest, f"diffusion_model.{rest}", f"base_model.model.{rest}"]  # as ai-toolkit and peft save the one model they know
    return [*own, *bare, f"lycoris_{flat}", f"lycoris_{part}_{flat}", f"lora_{part}_{flat}"]


def _finder(spelled: Mapping[str, str], layers_per_block: int) -> Callable[[str], str | None]:
    def find(name: str) -> str | None:
        other = kohya.diffusers_name(name, layers_per_block) if layers_per_block else name
        return spelled.get(name) or spelled.get(other)

    return find


def _module(parts: Mapping[str, Tensor], kind: str) -> LycorisModule:
    factors = {role: parts[role] for role in _ROLES[kind] if role in parts}
    low = next((factors[name] for name in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b") if name in factors), None)
    alpha = float(parts["alpha"]) if "alpha" in parts else None
    if low is None:
        return LycorisModule(factors, 1.0, max(1, round(alpha or 1)))
    return LycorisModule(factors, 1.0 if alpha is None else alpha / len(low), len(low))


def misfits(file: LycorisFile, live: Lycoris) -> list[str]:
    """Empty if the file fits the adapter: same modules, factors and sizes. One line for each kind of difference."""
    lines = name_lines(file.strangers, file.lora.keys(), live.keys())
    wrong: Counter[tuple[str, str]] = Counter()
    for path in live.keys() & file.lora.keys():
        theirs, ours = (_described(lycoris[path]) for lycoris in (file.lora, live))
        if theirs != ours:
            wrong[theirs, ours] += 1
    for (theirs, ours), count in sorted(wrong.items())[:3]:
        lines.append(
            t(
                pt=f"{theirs} no arquivo, {ours} na configuração, em {count} módulos",
                en=f"{theirs} in the file, {ours} in the config, in {count} modules",
            )
        )
    return lines


def _described(module: LycorisModule) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, f.shape))}" for name, f in sorted(module.factors.items()))


def refuse_kind(names: Iterable[str], kind: str, path: Path) -> None:
    """A file that could be gone on from, were the config's adapter_kind another."""
    theirs = kind_of(names)
    if theirs != kind:
        said, wanted = (TITLES.get(each, "LoRA") for each in (theirs, kind))
        raise SourceError(
            t(pt=f"o arquivo é um {said}, não um {wanted}", en=f"the file is a {said}, not a {wanted}"),
            t(pt=f"use tipo_adaptador: {theirs}", en=f"use adapter_kind: {theirs}"),
            str(path),
        )


def _refuse_others(tensors: Mapping[str, Tensor], kind: str, path: Path) -> None:
    if kind_of(tensors) == "lora":
        refuse_other_kinds(tensors, path)
    refuse_kind(tensors, kind, path)
    for mark, name in {"hada_t1": "Tucker", "lokr_t2": "Tucker", "dora_scale": "DoRA"}.items():
        if any(key.endswith(f".{mark}") for key in tensors):
            raise SourceError(
                t(pt=f"o arquivo é um {TITLES[kind]} com {name} ({mark}), que não continuo",
                  en=f"the file is a {TITLES[kind]} with {name} ({mark}), which is not continued here"),
                t(pt="use um sem essa opção", en="use one without that option"),
                str(path),
            )  # fmt: skip
