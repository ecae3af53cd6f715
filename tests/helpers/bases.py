"""Tiny bases of every diffusion-transformer family, with random weights, in every layout people have.

A family is found by its `lora_trainer/families/<name>/tiny.py`: the numbers of its networks, and how its files are called.
What is written here is the same for all: a diffusers folder, ComfyUI's separate files in fp32, fp8 (plain and scaled) and GGUF,
and everything in one file.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import diffusers
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lora_trainer
from lora_trainer.bases import architecture
from lora_trainer.bases.tiny import Encoder, Tiny
from lora_trainer.bases.weights import WHOLE, Locate, Share

from .tiny_texts import text_of

NAMES = sorted(file.parent.name for file in Path(lora_trainer.__file__).parent.glob("families/*/tiny.py"))
LOSSY = {"fp8": 0.07, "fp8_scaled": 0.07, "gguf": 0.01}
"""Kind -> its largest rounding step, as a share of the largest weight."""
FP8 = torch.float8_e4m3fn
WORDS = 60
Configs = dict[str, dict[str, Any]]
Modules = dict[str, nn.Module]
State = dict[str, Tensor]
Written = tuple[dict[str, str], Modules]
"""The options of `modelo` that name a base, and the modules it was made from, as the family names and cuts them."""


@dataclass(frozen=True)
class Base:
    """A family's tiny base, or a variant of it. `absent`: parts whose weights are not there."""

    name: str
    tiny: Tiny
    absent: tuple[str, ...] = ()

    def without(self, *parts: str) -> "Base":
        return replace(self, absent=parts)

    # -- networks

    def configs(self, words: Mapping[str, int] | int = WORDS, *, files: bool = False) -> Configs:
        """By part; `words`: in the vocabulary of each text encoder. In `files` some differ from what folders have."""
        return {part: self._config(part, given, words, files) for part, given in self.tiny.parts.items()}

    def _config(self, part: str, given: Any, words: Mapping[str, int] | int, files: bool) -> dict[str, Any]:
        released = architecture.shipped(self.tiny.release or self.name, part)
        if not isinstance(given, Encoder):
            return {**released, **given}
        config = text_of(given).config(released, given, words if isinstance(words, int) else words[part])
        return {**config, **given.in_files} if files else config

    def modules(self, configs: Configs | None = None) -> Modules:
        """With random weights; language models with their head and tower."""
        configs = configs or self.configs()
        empty = [part for part in configs if not self._is_drawn(part)]
        made = randomised({part: self._build(part, configs[part]).eval() for part in empty})
        self.tiny.finish(made)
        return made | {part: self._build(part, config) for part, config in configs.items() if part not in made}

    def _build(self, part: str, config: dict[str, Any]) -> nn.Module:
        if part in self.tiny.encoders:
            return text_of(self.tiny.encoders[part]).build(config, self.tiny.encoders[part])
        kind = getattr(diffusers, config["_class_name"])
        built: nn.Module = kind.from_config({k: v for k, v in config.items() if k in inspect.signature(kind).parameters})
        return built

    def _is_drawn(self, part: str) -> bool:
        return part in self.tiny.encoders and not text_of(self.tiny.encoders[part]).drawn

    def _present(self, modules: Modules) -> Modules:
        return {part: module for part, module in modules.items() if part not in self.absent}

    def _cut(self, modules: Modules) -> Modules:
        cuts = {part: text_of(encoder).cut for part, encoder in self.tiny.encoders.items()}
        return {part: cuts[part](module) if part in cuts else module for part, module in modules.items()}

    # -- tokenizers

    def write_tokenizers(self, folder: Path) -> dict[str, int]:
        """Returns the number of words, by text encoder."""
        return {
            part: text_of(encoder).write_tokenizer(folder / tokenizer_folder(part, encoder), encoder)
            for part, encoder in self.tiny.encoders.items()
        }

    # -- as a diffusers folder

    def write_folder(self, path: Path) -> Modules:
        """Returns the modules it was made from, as the family cuts them."""
        modules = self._present(self.modules(self.configs(self.write_tokenizers(path))))
        encoders = self.tiny.encoders
        saved: dict[str, Any] = {
            part: text_of(encoders[part]).saved(module) if part in encoders else module for part, module in modules.items()
        }
        for part, module in saved.items():
            module.save_pretrained(path / part)
        scheduler = {**architecture.shipped(self.tiny.release or self.name, "scheduler"), **self.tiny.scheduler}
        (path / "scheduler").mkdir()
        (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
        (path / "model_index.json").write_text(json.dumps(self._index(saved, scheduler["_class_name"])))
        return self._cut(modules)

    def _index(self, saved: Modules, scheduler: str) -> dict[str, Any]:
        index: dict[str, Any] = {"_class_name": self.tiny.pipeline, "scheduler": ["diffusers", scheduler]}
        for part, given in self.tiny.parts.items():
            kind = type(saved.get(part)).__name__
            found = ["transformers" if isinstance(given, Encoder) else "diffusers", kind] if part in saved else [None, None]
            index[part] = found
            if isinstance(given, Encoder):
                tokenizer = given.tokenizer_class or text_of(given).tokenizer
                index[tokenizer_folder(part, given)] = ["transformers", tokenizer] if part in saved else [None, None]
        return {**index, **self.tiny.index}

    # -- as ComfyUI's files

    def write_files(self, folder: Path, kind: str = "fp32") -> Written:
        """`kind`: of the transformer and of large text encoders; all_in_one puts everything into one file."""
        folder.mkdir(parents=True, exist_ok=True)
        configs = self.configs(self.write_tokenizers(folder / "words"), files=True)
        modules = self._present(self.modules(configs))
        states = self.stored(modules, configs)
        base = folder / f"{self.name}.{'gguf' if kind == 'gguf' else 'safetensors'}"
        options = {"tokenizer": str(folder / "words"), "base_model": str(base)}
        if kind == "all_in_one":
            save(base, {f"{self._inside(part)}{key}": value for part, state in states.items() for key, value in state.items()})
            return options, self._cut(modules)
        states = {part: self._rounded(part, state, kind) for part, state in states.items()}
        transformer = states.pop("transformer")
        if kind == "gguf":
            write_gguf(base, {self.tiny.gguf_prefix + key: value for key, value in transformer.items()}, arch=self.tiny.gguf)
        else:
            save(base, transformer)
        for part, state in states.items():
            options[part] = save(folder / f"{self._file(part)}.safetensors", state)
        return options, self._cut(modules)

    def stored(self, modules: Modules, configs: Configs | None = None) -> dict[str, State]:
        """The state of each network as its file names and shapes it."""
        configs = configs or self.configs()
        return {
            part: text_of(self.tiny.encoders[part]).stored(module)
            if part in self.tiny.encoders
            else getattr(self, f"stored_{part}")(module, configs[part])
            for part, module in modules.items()
        }

    def stored_transformer(self, module: nn.Module, config: Mapping[str, Any] | None = None) -> State:
        return turned_round(module.state_dict(), self.tiny.locate(config or module.config))

    def stored_vae(self, module: nn.Module, config: Mapping[str, Any] | None = None) -> State:
        config = config or module.config
        locate = self.tiny.locate_vae(config)
        state = {key: value for key, value in module.state_dict().items() if key != "bn.num_batches_tracked"}
        return {key: as_convolution(key, value) for key, value in turned_round(self.tiny.stored_vae(state), locate).items()}

    def _rounded(self, part: str, state: State, kind: str) -> State:
        is_large = part == "transformer" or (part in self.tiny.encoders and text_of(self.tiny.encoders[part]).large)
        if not is_large or not kind.startswith("fp8"):
            return state
        scaled = kind == "fp8_scaled"
        wide = self.tiny.wide_in_scaled if scaled and part == "transformer" else ()
        return to_fp8(state, scaled=scaled, wide=wide)

    def _inside(self, part: str) -> str:
        """What its keys begin with in an all-in-one file."""
        if part not in self.tiny.encoders:
            return {"transformer": "model.diffusion_model.", "vae": self.tiny.vae_prefix}[part]
        encoder = self.tiny.encoders[part]
        return f"text_encoders.{encoder.inside or encoder.file}.transformer."

    def _file(self, part: str) -> str:
        return self.tiny.encoders[part].file if part in self.tiny.encoders else self.tiny.vae_file


def tokenizer_folder(part: str, encoder: Encoder) -> str:
    return encoder.tokenizer or part.replace("text_encoder", "tokenizer")


def of(name: str, variant: str = "") -> Base:
    """`variant`: a key of VARIANTS in the family's tiny.py."""
    module = importlib.import_module(f"lora_trainer.families.{name}.tiny")
    return Base(name, module.VARIANTS[variant] if variant else module.TINY)


KINDED = [(name, kind) for name in NAMES for kind in of(name).tiny.kinds]
STORED = [(name, kind) for name, kind in KINDED if kind in LOSSY]


@cache
def written(name: str, kind: str) -> Written:
    """`kind` "folder" is diffusers' layout."""
    folder = Path(mkdtemp(prefix=f"{name}-{kind}-"))
    if kind == "folder":
        return {"base_model": str(folder / "base")}, of(name).write_folder(folder / "base")
    return of(name).write_files(folder, kind)


def plain(name: str) -> dict[str, str]:
    return written(name, of(name).tiny.kinds[0])[0]


def pipeline(name: str, folder: str | Path) -> Any:
    """diffusers' own, of a diffusers folder."""
    tiny = of(name).tiny
    kind = getattr(diffusers, tiny.pipeline)
    parts = tiny.pipeline_parts(Path(folder))
    return kind.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, **parts)


# -- weights


def randomised(modules: Modules, seed: int = 0) -> Modules:
    torch.manual_seed(seed)
    for module in modules.values():
        for key, parameter in module.named_parameters():
            nn.init.normal_(parameter, mean=float("norm" in key and "linear" not in key), std=0.1)
        module.float()
    return modules


def turned_round(state: Mapping[str, Tensor], locate: Locate) -> State:
    """A module's state under the keys of a file, of which `locate` names the pieces."""
    made: State = {}
    fused: dict[str, list[tuple[Share, Tensor]]] = {}
    for name, value in state.items():
        piece = locate(name)[0]
        value = torch.cat(value.chunk(2)[::-1]) if piece.swapped else value
        value = value.T if piece.transposed else value
        if piece.share == WHOLE:
            made[piece.key] = value
        else:
            fused.setdefault(piece.key, []).append((piece.share, value))
    return made | {key: torch.cat([v for _, v in sorted(parts, key=lambda part: part[0])]) for key, parts in fused.items()}


def as_convolution(key: str, value: Tensor) -> Tensor:
    """Stable Diffusion's VAE has 1 x 1 convolutions where diffusers has matrices."""
    return value[:, :, None, None] if ".mid.attn_1." in key and value.ndim == 2 else value


def to_fp8(state: State, *, scaled: bool, wide: tuple[str, ...] = ()) -> State:
    """Matrices in fp8 as ComfyUI keeps them: cast, or divided by one factor that lies beside them. `wide` ones stay in 16 bits."""
    small: State = {}
    for key, value in state.items():
        if value.ndim != 2 or not key.endswith("weight") or key.startswith(wide):
            small[key] = value.bfloat16()
        elif scaled:
            scale = value.abs().max() / 448
            small[key], small[f"{key.removesuffix('weight')}scale_weight"] = (value / scale).to(FP8), scale.float()
        else:
            small[key] = value.to(FP8)
    return small | ({"scaled_fp8": torch.zeros(2, dtype=FP8)} if scaled else {})


def save(path: Path, state: State) -> str:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
    return str(path)


def write_gguf(path: Path, state: State, kind: str = "Q8_0", arch: str = "flux") -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, arch)
    for key, value in state.items():
        packs = value.ndim == 2 and key.endswith("weight") and value.shape[1] % 32 == 0
        type_ = GGMLQuantizationType[kind if packs else "F32"]
        writer.add_tensor(key, quantize(np.ascontiguousarray(value.numpy()), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- comparing


def weights(module: nn.Module) -> dict[str, Any]:
    """By name; of packed layers too."""
    found = dict(module.state_dict())
    for path, layer in module.named_modules():
        if hasattr(layer, "unpacked"):
            found[f"{path}.weight"] = layer.unpacked(torch.float32)
    return found


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> bool:
    """Of one shape, and no further apart than a share of the largest value."""
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
