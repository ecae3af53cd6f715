"""How a file differs, in words, from the adapter it should go into: one line for each kind of difference."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import t
from .lora import LoraModule
from .lycoris import LycorisModule
from .read import LoraFile
from .table import Modules


def differences(file: LoraFile[Any], live: Modules) -> list[str]:
    """Empty if the file fits the adapter: same modules, of the same kind and sizes."""
    both = {path: (file.lora[path], live[path]) for path in sorted(live.keys() & file.lora.keys())}
    lycoris = any(isinstance(module, LycorisModule) for module in live.values())
    own = _of_lycoris(both) if lycoris else _of_lora(both)
    return [*name_lines(file.strangers, file.lora.keys(), live.keys()), *own]


def _of_lora(both: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Ranks, sizes, matrices of one pair, DoRA; by path the file's module and the adapter's."""
    ranks = Counter((a.rank, b.rank) for a, b in both.values() if a.rank != b.rank)
    lines = [_counted(f"rank {theirs}", str(ours), count) for (theirs, ours), count in sorted(ranks.items())]
    lines += _listed({
        t(
            pt="{n} camadas têm outro tamanho: o arquivo é de outra família de modelo",
            en="{n} layers have another size: the file is of another model family",
        ): [path for path, (a, b) in both.items() if _layer_shape(a) != _layer_shape(b)],
        t(
            pt="{n} módulos do arquivo têm matrizes que não se multiplicam ({few})",
            en="{n} modules of the file have matrices that do not multiply ({few})",
        ): [path for path, (a, _) in both.items() if a.up.shape[1:2] != a.down.shape[:1]],
    })  # fmt: skip
    dora = [a.magnitude is not None for a, b in both.values() if (a.magnitude is None) != (b.magnitude is None)]
    return [*lines, *map(_dora_line, dora[:1])]


def _of_lycoris(both: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Factors and sizes."""
    pairs = [(_described(a), _described(b)) for a, b in both.values()]
    wrong = Counter((theirs, ours) for theirs, ours in pairs if theirs != ours)
    return [_counted(theirs, ours, count) for (theirs, ours), count in sorted(wrong.items())[:3]]


def name_lines(strangers: Sequence[str], theirs: Collection[str], ours: Collection[str]) -> list[str]:
    """What the file has and the adapter has not, and the other way round."""
    halves = sorted(set(strangers) & set(ours))
    unknown = [name for name in strangers if name not in halves]
    missing = sorted(set(ours) - {*theirs, *halves})
    return _listed({
        t(
            pt="o arquivo está incompleto: de {n} módulos só tem uma parte das matrizes ({few})",
            en="the file is incomplete: of {n} modules it has only some of the matrices ({few})",
        ): halves,
        t(
            pt="{n} módulos do arquivo não recebem LoRA aqui ({few})",
            en="{n} modules of the file get no LoRA here ({few})",
        ): unknown,
        t(
            pt="{n} módulos que recebem LoRA aqui faltam no arquivo ({few})",
            en="{n} modules that get a LoRA here are missing in the file ({few})",
        ): missing,
    })  # fmt: skip


def _listed(told: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines whose lists of names are not empty, with their number and the first."""
    return [line.format(n=len(names), few=_sample(names)) for line, names in told.items() if names]


def _dora_line(in_file: bool) -> str:
    without, having = t(pt="sem", en="without"), t(pt="com", en="with")
    theirs, ours = (having, without) if in_file else (without, having)
    return t(
        pt=f"{theirs} DoRA no arquivo, {ours} DoRA na configuração",
        en=f"{theirs} DoRA in the file, {ours} DoRA in the config",
    )


def _counted(theirs: str, ours: str, count: int) -> str:
    return t(
        pt=f"{theirs} no arquivo, {ours} na configuração, em {count} módulos",
        en=f"{theirs} in the file, {ours} in the config, in {count} modules",
    )


def _layer_shape(module: LoraModule) -> tuple[int, ...]:
    return (module.up.shape[0], *module.down.shape[1:])


def _described(module: LycorisModule) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, f.shape))}" for name, f in sorted(module.factors.items()))


def _sample(names: Sequence[str]) -> str:
    return names[0] + (", …" if len(names) > 1 else "")
