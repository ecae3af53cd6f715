"""Low-rank adapters on a frozen model: which layers get one, how it starts, and what it holds.

peft supplies the layers; this module owns their start. Every A matrix is drawn on the CPU from (seed, module path)
alone, so it depends neither on what ran before, nor on the device or dtype of the base, nor on which other layers are
adapted. Adapter weights are float32 on any base: in half precision, updates at usual learning rates would round away.

Left out: peft's other initialisations (PiSSA, OLoRA, …), which change the base weights that a file is loaded onto.
"""

import difflib
import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from .config.names import shown
from .config.schema import ModelConfig
from .errors import ConfigError, SourceError, t
from .export import Lora, LoraFile, LoraModule, differences, read_lora, read_tensors
from .export.fused import slots_of
from .export.readers import unreadable

if TYPE_CHECKING:
    from .families._base import Family

NAME = "default"
"""peft's name for our one adapter. It appears in no file."""
_MOST_ZERO = 0.05
"""Share of all-zero matrices in a part beyond which a base is refused; trained networks have none."""
_NOTHING = 1e-30
"""Zero, as packed weights come back."""


class Adapter:
    """The trainable layers of a model by module path. Paths are those at injection, whatever wraps the blocks later."""

    def __init__(self, layers: Mapping[str, LoraLayer], family: "Family", layers_per_block: int = 2) -> None:
        self.layers = dict(layers)
        self.family = family
        self.layers_per_block = layers_per_block

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
            found[f"{path}.lora_A.weight"] = layer.lora_A[NAME].weight
            found[f"{path}.lora_B.weight"] = layer.lora_B[NAME].weight
            if NAME in layer.lora_magnitude_vector:
                found[f"{path}.lora_magnitude_vector"] = layer.lora_magnitude_vector[NAME].weight
        return found

    def parameters_by_part(self) -> dict[str, list[nn.Parameter]]:
        """`unet`, `text_encoder`, … -> parameters; parts without adapters are absent."""
        parts: dict[str, list[nn.Parameter]] = {}
        for key, parameter in self.named_parameters().items():
            parts.setdefault(key.partition(".")[0], []).append(parameter)
        return parts

    def scalings(self) -> dict[str, float]:
        """Module path -> what multiplies B @ A: alpha / rank, or alpha / sqrt(rank) under rsLoRA."""
        return {path: float(layer.scaling[NAME]) for path, layer in self.layers.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies in float32 on the CPU, keyed as in named_parameters."""
        return {
            key: parameter.detach().to("cpu", torch.float32, copy=True)
            for key, parameter in self.named_parameters().items()
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parameters = self.named_parameters()
        wrong = sorted(state.keys() ^ parameters.keys())
        wrong += [k for k in sorted(state.keys() & parameters.keys()) if state[k].shape != parameters[k].shape]
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
        for key, parameter in parameters.items():
            parameter.copy_(state[key])

    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.named_parameters().values())

    def is_untrained(self) -> bool:
        """Every B is zero, as at the start: the model answers as the base does."""
        return not any(bool(layer.lora_B[NAME].weight.any()) for layer in self.layers.values())

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

    def export(self) -> Lora:
        """The adapter as plain float32 CPU tensors, apart from the model."""
        state, scalings = self.state_dict(), self.scalings()
        lora = {}
        for path in self.layers:
            magnitude = state.get(f"{path}.lora_magnitude_vector")
            lora[path] = LoraModule(
                state[f"{path}.lora_A.weight"],
                state[f"{path}.lora_B.weight"],
                scalings[path],
                None if magnitude is None else magnitude.flatten(),
            )
        return lora

    def state_of(self, lora: Lora) -> dict[str, Tensor]:
        """What load_state_dict needs to have the effect of `lora` under our own scalings."""
        state: dict[str, Tensor] = {}
        for path, scaling in self.scalings().items():
            module = lora[path].with_scale(scaling)
            state[f"{path}.lora_A.weight"], state[f"{path}.lora_B.weight"] = module.down, module.up
            if module.magnitude is not None:
                vector = self.layers[path].lora_magnitude_vector[NAME].weight
                state[f"{path}.lora_magnitude_vector"] = module.magnitude.reshape(vector.shape)
        return state

    def load_file(self, path: Path) -> None:
        """Start from a LoRA file, kohya or diffusers, or a PEFT folder, of any float type; it must fit this adapter exactly."""
        self.load_state_dict(self.state_of(self.read_fitting(path).lora))

    def read_fitting(self, path: Path) -> LoraFile:
        """The file, whole, finite and of this adapter's modules, ranks and kind. Looks at shapes: works on meta too."""
        file = self._read(path)
        if lines := differences(file, self._shapes()):
            origin = file.metadata.get("modelspec.architecture") or file.metadata.get("ss_base_model_version")
            known = t(pt=f"; o arquivo diz ser de `{origin}`", en=f"; the file is for `{origin}`") if origin else ""
            raise SourceError(
                t(pt="o LoRA inicial não combina com este treino", en="the initial LoRA does not fit this training")
                + known
                + "".join(f"\n  - {line}" for line in lines),
                t(
                    pt="iguale ao arquivo classificacao_lora, classificacao_conv, alvos_lora, dora e "
                    "treinar_codificador_texto, ou use outro lora_inicial",
                    en="make lora_rank, conv_rank, lora_targets, dora and train_text_encoder equal to the file's, "
                    "or use another initial_lora",
                ),
                str(path),
            )
        return file

    def _read(self, path: Path) -> LoraFile:
        if path.is_dir():
            from .export.peft_folder import read_peft_folder

            lora = read_peft_folder(path)
            own = {name: module for name, module in lora.items() if name in self.layers}
            return LoraFile(own, [name for name in lora if name not in own], {})
        prefixes, slots = self.family.export_prefixes(), slots_of(self.family)
        return read_lora(path, list(self.layers), prefixes, self.layers_per_block, slots)

    def _shapes(self) -> Lora:
        """The adapter's own tensors, wherever they are, for comparing shapes."""
        return {
            path: LoraModule(
                layer.lora_A[NAME].weight,
                layer.lora_B[NAME].weight,
                float(layer.scaling[NAME]),
                layer.lora_magnitude_vector[NAME].weight if NAME in layer.lora_magnitude_vector else None,
            )
            for path, layer in self.layers.items()
        }


def inject(
    model: nn.ModuleDict, family: "Family", settings: ModelConfig, seed: int, formats: Collection[str] = ("kohya",)
) -> Adapter:
    """Freeze the model and put fresh adapters (B = 0) on the layers that `settings` names.

    `formats` are the files to be written: layers that their readers would not find again are refused.
    """
    model.requires_grad_(False)
    paths = find_targets(model, family, settings, formats)
    with torch.random.fork_rng(devices=[]):  # peft draws matrices of its own, which are replaced below
        inject_adapter_in_model(_peft_config(model, paths, settings), model, adapter_name=NAME)
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in paths}
    assert all(isinstance(layer, LoraLayer) for layer in layers.values())
    for path, layer in layers.items():
        _start(path, layer, seed)
    unet_config = getattr(model["unet"], "config", None) if "unet" in model else None
    per_block = getattr(unet_config, "layers_per_block", 2)
    return Adapter(layers, family, per_block if isinstance(per_block, int) else 2)


def find_targets(
    model: nn.ModuleDict, family: "Family", settings: ModelConfig, formats: Collection[str] = ("kohya",)
) -> list[str]:
    """Paths of the linear and convolution layers to adapt, in the model's order."""
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    text = [name for name in layers if name.startswith("text_encoder")]
    rest = [name for name in layers if not name.startswith("text_encoder")]
    if settings.lora_targets in family.lora_targets:
        pattern = re.compile(family.lora_targets[settings.lora_targets])
        chosen = [name for name in rest if pattern.fullmatch(name)]
    else:
        pattern = _user_pattern(settings.lora_targets, family)
        chosen = [name for name in rest if pattern.search(name)]
    if not chosen:
        raise _no_match(settings.lora_targets, rest, family)
    if settings.train_text_encoder:
        pattern = re.compile(family.text_targets)
        adapted = [name for name in text if pattern.fullmatch(name)]
        assert adapted, "train_text_encoder needs the text encoders in the model"
        chosen += adapted
    if settings.dora and "kohya" in formats and slots_of(family) is not None:
        raise ConfigError(
            t(
                pt=f"um arquivo kohya de {family.title} não guarda DoRA: q, k e v são uma só matriz",
                en=f"a kohya file of {family.title} cannot hold DoRA: q, k and v are one matrix",
            ),
            t(pt="use saida.formatos: [diffusers], ou apague dora", en="use output.formats: [diffusers], or delete dora"),
            shown("model", "dora"),
        )
    config = getattr(model["unet"], "config", None) if "unet" in model else None
    if lost := unreadable(chosen, family, formats, config):
        raise _not_carried(settings.lora_targets, lost)
    return chosen


def check_targets(family: "Family", settings: ModelConfig, formats: Collection[str] = ("kohya",)) -> None:
    """Before anything is loaded: lora_targets finds layers that the files can carry, and initial_lora fits them."""
    if settings.initial_lora:
        check_initial_file(Path(settings.initial_lora), family, settings, formats)
    else:
        find_targets(_skeleton(family, settings), family, settings, formats)


def check_initial_file(
    path: Path, family: "Family", settings: ModelConfig, formats: Collection[str] = ("kohya",)
) -> None:
    """Before anything is loaded: `path` is whole and finite, and fits the adapter that `settings` describes."""
    if path.is_file():
        read_tensors(path)  # what is wrong with the file itself is told first
    inject(_skeleton(family, settings), family, settings, 0, formats).read_fitting(path)


def _skeleton(family: "Family", settings: ModelConfig) -> nn.ModuleDict:
    return family.load_model(torch.device("meta"), torch.float16, with_text=settings.train_text_encoder)


@torch.no_grad()
def check_base(model: nn.ModuleDict) -> list[str]:
    """Notices on a base just loaded; SourceError if it holds NaN or infinity, or if much of it is zeros.

    A download whose space was reserved but not filled reads as a whole file. Call it before the blocks are wrapped.
    """
    notices = []
    for part, module in model.items():
        kinds = {name: isinstance(layer, (nn.Linear, nn.Conv2d)) for name, layer in module.named_modules()}
        extremes = {name: _extremes(weight) for name, weight in _base_weights(module)}
        bad = [name for name, (low, high) in extremes.items() if not math.isfinite(low) or not math.isfinite(high)]
        if bad:
            raise _unusable_base(
                t(
                    pt=f"{part}: {len(bad)} de {len(extremes)} tensores têm NaN ou infinito ({bad[0]}, …)",
                    en=f"{part}: {len(bad)} of {len(extremes)} tensors hold NaN or infinity ({bad[0]}, …)",
                )
            )
        weights = [name for name in extremes if name.endswith("weight") and kinds[name.rpartition(".")[0]]]
        zero = [name for name in weights if max(map(abs, extremes[name])) < _NOTHING]
        told = t(
            pt=f"{part}: {len(zero)} de {len(weights)} matrizes de pesos só têm zeros ({', '.join(zero[:1])}, …)",
            en=f"{part}: {len(zero)} of {len(weights)} weight matrices hold nothing but zeros ({', '.join(zero[:1])}, …)",
        )
        if len(zero) > _MOST_ZERO * len(weights):
            raise _unusable_base(told)
        notices += [told] if zero else []
    return notices


def _base_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating weights by name, packed ones unpacked one at a time when looked at; not the adapters' own."""
    for name, layer in module.named_modules():
        if ".lora_" in f".{name}":
            continue
        own = {key: value for key, value in layer._parameters.items() if value is not None}
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            own["weight"] = layer.weight  # of a packed layer, a property
        yield from ((f"{name}.{key}", value) for key, value in own.items() if value.is_floating_point())


def _extremes(weight: Tensor) -> tuple[float, float]:
    """Smallest and largest value, NaN if there is one: one pass, no copy."""
    if not weight.numel():
        return 0.0, 0.0
    low, high = torch.aminmax(weight.detach())
    return float(low), float(high)


def _unusable_base(cause: str) -> SourceError:
    return SourceError(
        t(pt=f"os pesos do modelo base não servem: {cause}", en=f"the base model's weights are unusable: {cause}"),
        t(
            pt="o download deve ter sido interrompido ou alterado: baixe o modelo de novo e confira o hash",
            en="the download was probably cut short or altered: download the model again and check its hash",
        ),
        shown("model", "base_model"),
    )


def _not_carried(text: str, lost: list[str]) -> ConfigError:
    listed = "".join(f"\n    {path}" for path in lost[:8]) + ("\n    …" if len(lost) > 8 else "")
    return ConfigError(
        t(
            pt=f"`{text}` pega {len(lost)} camadas que o diffusers não acha num arquivo kohya:{listed}",
            en=f"`{text}` matches {len(lost)} layers that diffusers does not find in a kohya file:{listed}",
        ),
        t(
            pt="restrinja a expressão (por exemplo, `_block`), ou use saida.formatos: [diffusers]",
            en="narrow the expression (for example, `_block`), or set output.formats: [diffusers]",
        ),
        shown("model", "lora_targets"),
    )


def _user_pattern(text: str, family: "Family") -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        presets = ", ".join(family.lora_targets)
        raise ConfigError(
            t(
                pt=f"`{text}` não é um dos conjuntos de camadas nem uma expressão regular válida ({error})",
                en=f"`{text}` is neither a set of layers nor a valid regular expression ({error})",
            ),
            t(
                pt=f"use um destes: {presets}; ou uma expressão como `attn2.*to_[qkv]$`",
                en=f"use one of: {presets}; or an expression such as `attn2.*to_[qkv]$`",
            ),
            shown("model", "lora_targets"),
        ) from error


def _no_match(text: str, names: list[str], family: "Family") -> ConfigError:
    kinds = sorted({re.sub(r"\d+", "N", name) for name in names})
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", text).strip(".")
    near = sorted(kinds, key=lambda kind: -difflib.SequenceMatcher(None, plain, kind[-len(plain) :]).ratio())[:5]
    listed = "".join(f"\n    {kind}" for kind in near)
    presets = ", ".join(family.lora_targets)
    return ConfigError(
        t(pt=f"nenhuma camada do modelo combina com `{text}`", en=f"no layer of the model matches `{text}`"),
        t(
            pt=f"conjuntos prontos: {presets}. Camadas parecidas (N = número):{listed}",
            en=f"ready sets: {presets}. Similar layers (N = a number):{listed}",
        ),
        shown("model", "lora_targets"),
    )


def _peft_config(model: nn.ModuleDict, paths: list[str], settings: ModelConfig) -> LoraConfig:
    modules = dict(model.named_modules())
    rank = settings.lora_rank
    alpha = float(rank if settings.lora_alpha is None else settings.lora_alpha)
    conv_rank = settings.conv_rank or rank
    same_strength = math.sqrt(conv_rank / rank) if settings.rslora else conv_rank / rank
    conv_alpha = alpha * same_strength if settings.conv_alpha is None else settings.conv_alpha
    convs = [re.escape(path) for path in paths if _is_wide_conv(modules[path])]
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=paths,
        lora_dropout=settings.lora_dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        rank_pattern=dict.fromkeys(convs, conv_rank) if conv_rank != rank else {},
        alpha_pattern=dict.fromkeys(convs, conv_alpha) if conv_alpha != alpha else {},
    )


def _is_wide_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and tuple(module.kernel_size) != (1, 1)


@torch.no_grad()
def _start(path: str, layer: LoraLayer, seed: int) -> None:
    """B = 0, A uniform in ±1/sqrt(fan in) as in the LoRA authors' code (Kaiming with a = √5), all float32."""
    for group in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
        if NAME in group:
            group[NAME].to(torch.float32)
    weight = layer.lora_A[NAME].weight
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    fresh = torch.empty(weight.shape)
    nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
    weight.copy_(fresh)
    layer.lora_B[NAME].weight.zero_()
