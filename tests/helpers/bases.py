"""Tiny bases of every diffusion-transformer family, found by name: `<family>_bases.py` in this folder.

Each such file has KINDS (of single files; the first is the plain one), PIPELINE (diffusers' class), `write_folder(path)`,
`write_files(folder, kind)`, and NARROW: what makes the released transformer small enough to be measured. It may have
`pipeline_parts(path)`: parts of the pipeline that cannot be loaded without libraries that we do not need.
"""

import importlib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor, nn

NAMES = sorted(file.name.removesuffix("_bases.py") for file in Path(__file__).parent.glob("*_bases.py"))
LOSSY = {"fp8": 0.07, "fp8_scaled": 0.07, "gguf": 0.01}
"""Kind -> its largest rounding step, as a share of the largest weight."""


def of(name: str) -> Any:
    return importlib.import_module(f"helpers.{name}_bases")


KINDED = [(name, kind) for name in NAMES for kind in of(name).KINDS]
STORED = [(name, kind) for name, kind in KINDED if kind in LOSSY]


@cache
def written(name: str, kind: str) -> tuple[dict[str, str], dict[str, nn.Module]]:
    """The options of `modelo` that name a base, and the modules it was made from; `kind` "folder" is diffusers' layout."""
    folder = Path(mkdtemp(prefix=f"{name}-{kind}-"))
    if kind == "folder":
        return {"base_model": str(folder / "base")}, of(name).write_folder(folder / "base")
    options, modules = of(name).write_files(folder, kind)
    return options, modules


def pipeline(name: str, folder: str | Path) -> Any:
    """diffusers' own, of a diffusers folder."""
    import diffusers
    import torch

    extra = getattr(of(name), "pipeline_parts", lambda folder: {})(Path(folder))
    kind = getattr(diffusers, of(name).PIPELINE)
    return kind.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, **extra)


def plain(name: str) -> dict[str, str]:
    return written(name, of(name).KINDS[0])[0]


def weights(module: nn.Module) -> dict[str, Any]:
    """By name; of packed layers too."""
    import torch

    found = dict(module.state_dict())
    for path, layer in module.named_modules():
        if hasattr(layer, "unpacked"):
            found[f"{path}.weight"] = layer.unpacked(torch.float32)
    return found


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> bool:
    """Of one shape, and no further apart than a share of the largest value."""
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
