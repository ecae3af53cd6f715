"""diffusers' own converters of FLUX.1 and Chroma, whose width is hard-coded, at the width of our tiny bases."""

from pathlib import Path
from typing import Any

from diffusers.loaders import single_file_utils
from torch import Tensor

WIDTH = 64


def converted(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    source = Path(single_file_utils.__file__).read_text(encoding="utf-8").replace("inner_dim = 3072", f"inner_dim = {WIDTH}")
    scope: dict[str, Any] = {"__name__": single_file_utils.__name__, "__package__": "diffusers.loaders"}
    exec(compile(source, single_file_utils.__file__, "exec"), scope)
    return dict(scope[f"convert_{name}_transformer_checkpoint_to_diffusers"](dict(state)))
