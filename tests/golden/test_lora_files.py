"""LoRA files of transformer families in both layouts: names that their readers look for, and old files that load for ever.

The key lists were read against what diffusers, ComfyUI and Forge look for; a change breaks users. The files are those of
version 0.1.0. A new family's are written once, here: python tests/golden/test_lora_files.py <family>
"""

# ruff: noqa: E402
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers import bases

from lora_trainer.adapters import Adapter, inject
from lora_trainer.bases import architecture as _architecture
from lora_trainer.config.schema import DataConfig, ModelConfig
from lora_trainer.export.write import save_adapter
from lora_trainer.families import resolve
from lora_trainer.layouts import read_lora

LAYOUTS = ("diffusers", "kohya")
RELEASES: dict[str, tuple[dict[str, Any], str]] = {
    "flux": (
        {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 1, "axes_dims_rope": [4, 6, 6]},
        r"transformer_blocks\.0\.(attn|ff|norm|proj)",
    ),
    "sd3": (
        {"num_layers": 3, "num_attention_heads": 1, "attention_head_dim": 16, "caption_projection_dim": 16,
         "pos_embed_max_size": 64, "dual_attention_layers": [0]},
        r"transformer_blocks\.[02]\.(attn|ff|norm1)",
    ),
}  # fmt: skip
"""Family -> how its released transformer is made small, and the layers: of the first and the last block of each kind. A family
that is not named here is made as small as its tiny base says (`narrow`), and all its layers are taken."""
NAMES = sorted({path.name.removesuffix("_v0.1.0.norms.json") for path in HERE.glob("*_v0.1.0.norms.json")} & set(bases.NAMES))


def adapter_of(name: str, folder: Path) -> Adapter:
    """On the small model, random and apart from any file."""
    small, targets = RELEASES.get(name) or (dict(bases.of(name).tiny.narrow), "all")
    config = _architecture.shipped(name, "transformer") | small
    (folder / "transformer").mkdir()
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    settings = ModelConfig(family=name, architecture=str(folder), lora_rank=2, lora_alpha=4, lora_targets=targets)
    family: Any = resolve(settings, DataConfig(), planning=True)
    component = family.components["transformer"]
    model = nn.ModuleDict({"transformer": component.build(component.config)}).requires_grad_(False)
    adapter = inject(model, family, settings, 0, LAYOUTS)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, parameter in adapter.named_parameters().items():
            if "lora_B" in key:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
    return adapter


def written(adapter: Adapter, folder: Path, layout: str) -> Path:
    return save_adapter(adapter, adapter.family, folder / f"{layout}.safetensors", layout, "fp16", {})  # type: ignore[arg-type]


def keys(path: Path) -> list[str]:
    tensors = load_file(path)
    return [f"{key} {list(tensors[key].shape)} {tensors[key].dtype}" for key in sorted(tensors)]


def norms(lora: Any) -> dict[str, float]:
    return {path: float(module.delta().norm()) for path, module in lora.items()}


@pytest.mark.parametrize("name", NAMES)
def test_key_list(tmp_path, name):
    adapter = adapter_of(name, tmp_path)
    for layout in LAYOUTS:
        expected = (HERE / f"{name}_{layout}.keys.txt").read_text(encoding="utf-8").splitlines()
        assert keys(written(adapter, tmp_path, layout)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_old_files_still_load(tmp_path, name):
    adapter = adapter_of(name, tmp_path)
    expected = json.loads((HERE / f"{name}_v0.1.0.norms.json").read_text(encoding="utf-8"))
    for layout in LAYOUTS:
        old = HERE / f"{name}_{layout}_v0.1.0.safetensors"
        paths, prefixes = list(adapter.layers), adapter.family.export_prefixes()
        file = read_lora(old, paths, prefixes, slots=adapter.family.kohya_slots)
        assert not file.strangers
        assert norms(file.lora) == pytest.approx(expected, rel=2e-3)
        adapter.load_file(old)
        assert norms(adapter.export()) == pytest.approx(expected, rel=2e-3)


def write(name: str, folder: Path) -> None:
    adapter = adapter_of(name, folder)
    for layout in LAYOUTS:
        path = written(adapter, folder, layout)
        (HERE / f"{name}_{layout}.keys.txt").write_text("\n".join(keys(path)) + "\n", encoding="utf-8")
        path.rename(HERE / f"{name}_{layout}_v0.1.0.safetensors")
    facts = json.dumps({path: round(norm, 5) for path, norm in norms(adapter.export()).items()}, indent=1)
    (HERE / f"{name}_v0.1.0.norms.json").write_text(facts + "\n", encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    for chosen in sys.argv[1:]:
        with tempfile.TemporaryDirectory(dir=HERE) as place:
            write(chosen, Path(place))
