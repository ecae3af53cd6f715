"""What is trained, by module path: its tensors and rates, states to resume from, and the adapter as files hold it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..config.names import shown
from ..errors import SourceError, t
from ..files.headers import read_header
from ..layouts import Lora, LoraFile, LoraModule, differences, read_lora
from ..layouts.lycoris import LycorisModule
from ..layouts.lycoris_files import read_lycoris
from ..layouts.peft import read_peft_folder
from ..layouts.read import refuse_kind
from ..layouts.table import Modules
from ..seam.family import Family
from . import pissa
from .layers import AdaptedLayer

NAME = "default"
"""peft's name for our one adapter. It appears in no file."""
_DOWN, _UP, _MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
Layer: TypeAlias = LoraLayer | AdaptedLayer


class Adapter:
    """The trainable layers of a model by module path. Paths are those at injection, whatever wraps the blocks later."""

    def __init__(self, layers: Mapping[str, Layer], family: Family, layers_per_block: int = 2) -> None:
        self.layers = dict(layers)
        self.family = family
        self.layers_per_block = layers_per_block
        self.rates: dict[str, float] = {}
        """Module path -> learning rate, of those that have one of their own."""

    @property
    def kind(self) -> str:
        """lora, loha or lokr."""
        first = next(iter(self.layers.values()))
        return first.kind if isinstance(first, AdaptedLayer) else "lora"

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Key as in a diffusers file (`unet.….lora_A.weight`) -> parameter."""
        return {f"{path}.{name}": factor for path, layer in self.layers.items() for name, factor in factors(layer).items()}

    def named_tensors(self) -> dict[str, Tensor]:
        """The parameters, and what they are measured from (PiSSA's start)."""
        return {f"{path}.{name}": tensor for path, layer in self.layers.items() for name, tensor in _tensors(layer).items()}

    def scalings(self) -> dict[str, float]:
        """Module path -> what multiplies the product: alpha / rank, or alpha / sqrt(rank) under rsLoRA."""
        return {path: _scale(layer) for path, layer in self.layers.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies in float32 on the CPU, keyed as in named_tensors."""
        return {key: _copy(tensor) for key, tensor in self.named_tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        tensors = self.named_tensors()
        wrong = sorted(state.keys() ^ tensors.keys())
        wrong += [k for k in sorted(state.keys() & tensors.keys()) if state[k].shape != tensors[k].shape]
        if wrong:
            raise SourceError.said(
                pt=f"o estado salvo é de outro LoRA: {len(wrong)} tensores não combinam ({wrong[0]}, …)",
                en=f"the saved state is of another LoRA: {len(wrong)} tensors do not match ({wrong[0]}, …)",
                hint_pt="retome com o mesmo rank e os mesmos alvos, ou comece um treino novo",
                hint_en="resume with the same rank and targets, or start a new training",
            )
        for key, tensor in tensors.items():
            tensor.copy_(state[key])

    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.named_parameters().values())

    def is_untrained(self) -> bool:
        """Nothing is added to any weight, as at the start: the model answers as the base does."""
        return all(_adds_nothing(layer) for layer in self.layers.values())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model answers as the base does."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    @torch.no_grad()
    def rehearse_start(self) -> None:
        """Take the memory that starting took, on a model of fake tensors."""
        pissa.rehearse((layer for layer in self.layers.values() if _has_start(layer)), NAME)

    # -- as files hold it

    def modules(self) -> Modules:
        """Plain float32 CPU tensors, apart from the model."""
        return {path: _module(layer) for path, layer in self.layers.items()}

    def export(self) -> Lora:
        """The same where they are a LoRA."""
        assert self.kind == "lora", self.kind
        return cast(Lora, self.modules())

    def state_of(self, modules: Modules) -> dict[str, Tensor]:
        """What load_state_dict needs to have the effect of `modules` under our own scalings."""
        return {
            f"{path}.{name}": value
            for path, scaling in self.scalings().items()
            for name, value in _values(self.layers[path], modules[path].with_scale(scaling)).items()
        }

    def load_file(self, path: Path) -> None:
        """Start from a file, kohya or diffusers, or a PEFT folder, of any float type; it must fit this adapter exactly."""
        self.load_state_dict(self.state_of(self.read_fitting(path).lora))

    def read_fitting(self, path: Path) -> LoraFile[Any]:
        """The file, whole, finite and of this adapter's modules, ranks and kind. Looks at shapes: works on meta too."""
        file = self.read(path)
        shapes = {path: _plain(layer, dict(factors(layer))) for path, layer in self.layers.items()}
        if lines := differences(file, shapes):
            raise _not_fitting(file.metadata, lines, path)
        return file

    def read(self, path: Path) -> LoraFile[Any]:
        """A file, or a PEFT folder, of the adapter's kind; only what it holds of our modules."""
        paths, prefixes = list(self.layers), self.family.export_prefixes()
        if self.kind != "lora":
            return read_lycoris(path, paths, prefixes, self.layers_per_block, self.kind)
        if path.is_dir():
            lora = read_peft_folder(path)
            own = {name: module for name, module in lora.items() if name in self.layers}
            return LoraFile(own, [name for name in lora if name not in own], {})
        if path.is_file():
            refuse_kind(read_header(path, shown("model", "initial_lora"))[0], "lora", path)
        return read_lora(path, paths, prefixes, self.layers_per_block, self.family.kohya_slots)


def factors(layer: Layer) -> dict[str, nn.Parameter]:
    """What is trained of a layer, by the names that files give it; of a LoRA, those of diffusers."""
    if isinstance(layer, AdaptedLayer):
        return layer.factors()
    found = {_DOWN: layer.lora_A[NAME].weight, _UP: layer.lora_B[NAME].weight}
    return found | ({_MAGNITUDE: layer.lora_magnitude_vector[NAME].weight} if NAME in layer.lora_magnitude_vector else {})


def _tensors(layer: Layer) -> dict[str, Tensor]:
    starts = {name: cast(Tensor, getattr(layer, name)) for name in pissa.STARTS} if _has_start(layer) else {}
    return {**factors(layer), **starts}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _module(layer: Layer) -> LoraModule | LycorisModule:
    values = {name: _copy(tensor) for name, tensor in _tensors(layer).items()}
    plain = _plain(layer, values)
    if isinstance(plain, LoraModule) and _has_start(layer):
        return pissa.exported(plain, *(values[name] for name in pissa.STARTS))
    return plain


def _plain(layer: Layer, values: Mapping[str, Tensor]) -> LoraModule | LycorisModule:
    if isinstance(layer, AdaptedLayer):
        return LycorisModule(dict(values), layer.scale, layer.rank)
    magnitude = values.get(_MAGNITUDE)
    return LoraModule(values[_DOWN], values[_UP], _scale(layer), None if magnitude is None else magnitude.flatten())


def _values(layer: Layer, module: LoraModule | LycorisModule) -> dict[str, Tensor]:
    """By name, what gives the layer the effect of this module."""
    if isinstance(module, LycorisModule):
        return module.factors
    if _has_start(layer):
        found = pissa.apart(module)
        return {_DOWN: found[0], _UP: found[1], **dict(zip(pissa.STARTS, found[2:], strict=True))}
    magnitude = {} if module.magnitude is None else {_MAGNITUDE: module.magnitude.reshape(factors(layer)[_MAGNITUDE].shape)}
    return {_DOWN: module.down, _UP: module.up, **magnitude}


def _scale(layer: Layer) -> float:
    return layer.scale if isinstance(layer, AdaptedLayer) else float(layer.scaling[NAME])


def _has_start(layer: Layer) -> bool:
    return isinstance(getattr(layer, pissa.STARTS[0], None), Tensor)


def _adds_nothing(layer: Layer) -> bool:
    if isinstance(layer, AdaptedLayer):
        return not bool(layer.factors()[layer.zero].any())
    up, down = layer.lora_B[NAME].weight, layer.lora_A[NAME].weight
    if not _has_start(layer):
        return not bool(up.any())
    start_a, start_b = (cast(Tensor, getattr(layer, name)) for name in pissa.STARTS)
    return torch.equal(down, start_a.to(down.dtype)) and torch.equal(up, start_b.to(up.dtype))


def _not_fitting(metadata: Mapping[str, str], lines: list[str], path: Path) -> SourceError:
    origin = metadata.get("modelspec.architecture") or metadata.get("ss_base_model_version")
    known = t(pt=f"; o arquivo diz ser de `{origin}`", en=f"; the file is for `{origin}`") if origin else ""
    return SourceError(
        t(pt="o LoRA inicial não combina com este treino", en="the initial LoRA does not fit this training")
        + known
        + "".join(f"\n  - {line}" for line in lines),
        t(
            pt="iguale ao arquivo classificacao_lora, classificacao_conv, regras_lora, alvos_lora, dora, fator_lokr e "
            "treinar_codificador_texto, ou use outro lora_inicial",
            en="make lora_rank, conv_rank, lora_rules, lora_targets, dora, lokr_factor and train_text_encoder equal to "
            "the file's, or use another initial_lora",
        ),
        str(path),
    )
