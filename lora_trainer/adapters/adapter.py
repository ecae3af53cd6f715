"""What is trained, by module path: its tensors and rates, states to resume from, and the adapter as files hold it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..config.names import shown
from ..errors import SourceError, t
from ..files.headers import read_header
from ..layouts import Lora, LoraFile, LoraModule, differences, read_lora
from ..layouts.fused import slots_of
from ..layouts.lycoris import Lycoris, LycorisFile, LycorisModule, misfits, read_lycoris, refuse_kind
from ..layouts.peft import read_peft_folder
from . import pissa
from .layers import AdaptedLayer

if TYPE_CHECKING:
    from ..seam.family import Family

NAME = "default"
"""peft's name for our one adapter. It appears in no file."""
Layer: TypeAlias = LoraLayer | AdaptedLayer


class Adapter:
    """The trainable layers of a model by module path. Paths are those at injection, whatever wraps the blocks later."""

    def __init__(self, layers: Mapping[str, Layer], family: "Family", layers_per_block: int = 2) -> None:
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

    @property
    def num_modules(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Key as in a diffusers file (`unet.….lora_A.weight`) -> parameter."""
        found: dict[str, nn.Parameter] = {}
        for path, layer in self.layers.items():
            if isinstance(layer, AdaptedLayer):
                found |= {f"{path}.{name}": factor for name, factor in layer.factors().items()}
                continue
            found[f"{path}.lora_A.weight"] = layer.lora_A[NAME].weight
            found[f"{path}.lora_B.weight"] = layer.lora_B[NAME].weight
            if NAME in layer.lora_magnitude_vector:
                found[f"{path}.lora_magnitude_vector"] = layer.lora_magnitude_vector[NAME].weight
        return found

    def named_tensors(self) -> dict[str, Tensor]:
        """The parameters, and what they are measured from (PiSSA's start)."""
        starts = {
            f"{path}.{name}": cast(Tensor, getattr(layer, name))
            for path, layer in self.layers.items()
            for name in (pissa.STARTS if _has_start(layer) else ())
        }
        return {**self.named_parameters(), **starts}

    def parameters_by_part(self) -> dict[str, list[nn.Parameter]]:
        """`unet`, `text_encoder`, … -> parameters; parts without adapters are absent."""
        parts: dict[str, list[nn.Parameter]] = {}
        for key, parameter in self.named_parameters().items():
            parts.setdefault(key.partition(".")[0], []).append(parameter)
        return parts

    def scalings(self) -> dict[str, float]:
        """Module path -> what multiplies the product: alpha / rank, or alpha / sqrt(rank) under rsLoRA."""
        return {path: _scale(layer) for path, layer in self.layers.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies in float32 on the CPU, keyed as in named_tensors."""
        return {
            key: tensor.detach().to("cpu", torch.float32, copy=True) for key, tensor in self.named_tensors().items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        tensors = self.named_tensors()
        wrong = sorted(state.keys() ^ tensors.keys())
        wrong += [k for k in sorted(state.keys() & tensors.keys()) if state[k].shape != tensors[k].shape]
        if wrong:
            raise SourceError(
                t(
                    pt=f"o estado salvo é de outro LoRA: {len(wrong)} tensores não combinam ({wrong[0]}, …)",
                    en=f"the saved state is of another LoRA: {len(wrong)} tensors do not match ({wrong[0]}, …)",
                ),
                t(
                    pt="retome com o mesmo rank e os mesmos alvos, ou comece um treino novo",
                    en="resume with the same rank and targets, or start a new training",
                ),
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

    def export(self) -> Lora:
        """A LoRA as plain float32 CPU tensors, apart from the model."""
        assert self.kind == "lora", self.kind
        state = self.state_dict()
        return {path: _exported(path, state, scale) for path, scale in self.scalings().items()}

    def export_lycoris(self) -> Lycoris:
        """The same of a LoHa or LoKr."""
        state = self.state_dict()
        found: Lycoris = {}
        for path, layer in self.layers.items():
            assert isinstance(layer, AdaptedLayer)
            factors = {name: state[f"{path}.{name}"] for name in layer.factors()}
            found[path] = LycorisModule(factors, layer.scale, layer.rank)
        return found

    def state_of(self, lora: Lora | Lycoris) -> dict[str, Tensor]:
        """What load_state_dict needs to have the effect of `lora` under our own scalings."""
        state: dict[str, Tensor] = {}
        for path, scaling in self.scalings().items():
            layer, module = self.layers[path], lora[path].with_scale(scaling)
            if isinstance(module, LycorisModule):
                state |= {f"{path}.{name}": factor for name, factor in module.factors.items()}
                continue
            assert isinstance(layer, LoraLayer)
            if _has_start(layer):
                state |= {f"{path}.{name}": value for name, value in _apart(module).items()}
                continue
            state[f"{path}.lora_A.weight"], state[f"{path}.lora_B.weight"] = module.down, module.up
            if module.magnitude is not None:
                vector = layer.lora_magnitude_vector[NAME].weight
                state[f"{path}.lora_magnitude_vector"] = module.magnitude.reshape(vector.shape)
        return state

    def load_file(self, path: Path) -> None:
        """Start from a file, kohya or diffusers, or a PEFT folder, of any float type; it must fit this adapter exactly."""
        self.load_state_dict(self.state_of(self.read_fitting(path).lora))

    def read_fitting(self, path: Path) -> LoraFile | LycorisFile:
        """The file, whole, finite and of this adapter's modules, ranks and kind. Looks at shapes: works on meta too."""
        if self.kind == "lora":
            file: LoraFile | LycorisFile = self._read(path)
            lines = differences(cast(LoraFile, file), self._shapes())
        else:
            file = self.read_lycoris(path)
            lines = misfits(file, self._factors())
        if lines:
            raise _not_fitting(file.metadata, lines, path)
        return file

    def read_lycoris(self, path: Path) -> LycorisFile:
        return read_lycoris(path, list(self.layers), self.family.export_prefixes(), self.layers_per_block, self.kind)

    def _read(self, path: Path) -> LoraFile:
        if path.is_file():
            refuse_kind(read_header(path, shown("model", "initial_lora"))[0], "lora", path)
        if path.is_dir():
            lora = read_peft_folder(path)
            own = {name: module for name, module in lora.items() if name in self.layers}
            return LoraFile(own, [name for name in lora if name not in own], {})
        prefixes, slots = self.family.export_prefixes(), slots_of(self.family)
        return read_lora(path, list(self.layers), prefixes, self.layers_per_block, slots)

    def _shapes(self) -> Lora:
        """The adapter's own tensors, wherever they are, for comparing shapes."""
        tensors: dict[str, Tensor] = dict(self.named_parameters())
        return {
            path: LoraModule(
                tensors[f"{path}.lora_A.weight"],
                tensors[f"{path}.lora_B.weight"],
                _scale(layer),
                tensors.get(f"{path}.lora_magnitude_vector"),
            )
            for path, layer in self.layers.items()
        }

    def _factors(self) -> Lycoris:
        layers = {path: layer for path, layer in self.layers.items() if isinstance(layer, AdaptedLayer)}
        return {path: LycorisModule(dict(each.factors()), each.scale, each.rank) for path, each in layers.items()}


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


def _exported(path: str, state: Mapping[str, Tensor], scale: float) -> LoraModule:
    magnitude = state.get(f"{path}.lora_magnitude_vector")
    plain = LoraModule(
        state[f"{path}.lora_A.weight"],
        state[f"{path}.lora_B.weight"],
        scale,
        None if magnitude is None else magnitude.flatten(),
    )
    if f"{path}.{pissa.STARTS[0]}" not in state:
        return plain
    start_a, start_b = (state[f"{path}.{name}"] for name in pissa.STARTS)
    down, up = torch.cat([start_a, plain.down - start_a]), torch.cat([plain.up - start_b, plain.up], 1)
    return replace(plain, down=down, up=up).balanced_by_component()


def _apart(module: LoraModule) -> dict[str, Tensor]:
    """The matrices and starts of which `_exported` would make this module of rank 2r."""
    rank = module.rank // 2
    old, new = module.down[:rank], module.down[rank:]
    change, up = module.up[:, :rank], module.up[:, rank:]
    return {"lora_A.weight": old + new, "lora_B.weight": up, "start_A": old, "start_B": up - change}


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
