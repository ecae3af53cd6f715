"""Where a language model's config and weights come from: a folder (or file) of safetensors, or a GGUF file kept packed.

Both give the same three things: the config, the module on meta, and its weights when they are wanted. What cannot be trained
is refused here, from configs and headers, before a weight is read.
"""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...bases import stored as _stored
from ...bases.gguf import GgufWeights, parameter_pieces
from ...bases.weights import Piece
from ...config.names import shown
from ...config.schema import ModelConfig
from ...errors import SourceError, t
from ...files.gguf_config import transformers_config
from ...files.sources import Source
from . import weights as _lm_weights

WHOLE = {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a base, as a merged model holds it. `dtype` is None for numbers that may be rounded."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]


class Base(ABC):
    config: Any
    """transformers' config."""
    notices: list[str]

    @abstractmethod
    def stored(self) -> dict[str, Stored]:
        """All tensors by the names that safetensors files of this model use."""

    @abstractmethod
    def key_of(self, parameter: str) -> str | None:
        """The name in `stored` of what alone makes up a parameter of the built model."""

    @abstractmethod
    def build(self, dtype: torch.dtype) -> nn.Module:
        """The module on meta, frozen; each layer knows when its weights will be read, where there are any (`read_at`)."""

    @abstractmethod
    def fill(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Read all weights into what `build` made and techniques have changed."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes with any weight."""


class SafetensorsBase(Base):
    def __init__(self, source: Source, settings: ModelConfig) -> None:
        self.source = source
        stored = _stored_config(source, settings)
        _refuse_quantised(stored, source)
        self.config = _typed_config(stored, source)
        self.weights = _stored.open_weights(source)
        model = _first_build(self.config, source)
        _check_trainable(model, source)
        if _lm_weights.is_untied(model, self.weights):
            self.config.tie_word_embeddings = False
            model = _lm_weights.build(self.config, torch.bfloat16)
        self.places = _lm_weights.Places()
        if self.weights.header:
            self.places = _lm_weights.find_places(model, self.weights, source.what)
        self.notices = _unused_notice(self.places.unused)

    def build(self, dtype: torch.dtype) -> nn.Module:
        model = _lm_weights.build(self.config, dtype)
        order = {key: number for number, key in enumerate(self.weights.header)}
        _stored.note_order(model, {name: order[key] for name, key in self.places.plain.items()})
        return model

    def fill(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        _lm_weights.fill(model, self.weights, self.places, device, dtype)

    def fingerprint(self) -> str:
        return self.weights.digest(self.weights.header)

    def stored(self) -> dict[str, Stored]:
        return {key: self._stored(key) for key in self.weights.header}

    def _stored(self, key: str) -> Stored:
        info = self.weights.header[key]
        if info.dtype in WHOLE:
            return Stored(info.shape, WHOLE[info.dtype], lambda: self.weights.read(key))
        return Stored(info.shape, None, lambda: self.weights.value(key))

    def key_of(self, parameter: str) -> str | None:
        return self.places.plain.get(parameter)


class GgufBase(Base):
    """`unpacked`: weights become plain ones as they are read (16-bit, or what a quantiser makes of them)."""

    def __init__(self, source: Source, *, unpacked: bool = False) -> None:
        self.source = source
        assert source.gguf is not None
        self.weights = GgufWeights(source.gguf)
        self.config = transformers_config(self.weights.file, source.what)
        model = _lm_weights.build(self.config, torch.bfloat16)
        _check_trainable(model, source)
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self.pieces = parameter_pieces(self.weights.file, shapes, source.what)
        wide = bool(self.weights.unpacked_kinds())
        self.unpacked = unpacked or wide
        self.notices = [self.weights.unpacked_notice()] if wide else []

    def build(self, dtype: torch.dtype) -> nn.Module:
        model = _lm_weights.build(self.config, dtype)
        _stored.note_order(model, {name: self.weights.header[piece.key].offset for name, piece in self.pieces.items()})
        if not self.unpacked:
            _stored.pack_layers_as_stored(model, self.weights, self.pieces, embeddings=True)
        return model

    def fill(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        _lm_weights.fill_buffers(model, device)
        _stored.fill(model, self.weights, self.pieces, device, lambda name: dtype)

    def fingerprint(self) -> str:
        with self.source.path.open("rb") as file:
            total = hashlib.blake2b(digest_size=16)
            while block := file.read(1 << 22):
                total.update(block)
        return total.hexdigest()

    def stored(self) -> dict[str, Stored]:
        def read(piece: Piece, shape: torch.Size) -> Callable[[], Tensor]:
            return lambda: self.weights.part(piece).reshape(shape)

        shapes = {
            name: value.shape for name, value in _lm_weights.build(self.config, torch.bfloat16).state_dict().items()
        }
        return {
            name: Stored(tuple(shapes[name]), None, read(piece, shapes[name])) for name, piece in self.pieces.items()
        }

    def key_of(self, parameter: str) -> str | None:
        return parameter if parameter in self.pieces else None


def open_base(source: Source, settings: ModelConfig) -> Base:
    return GgufBase(source) if source.gguf is not None else SafetensorsBase(source, settings)


def _stored_config(source: Source, settings: ModelConfig) -> dict[str, Any]:
    if settings.architecture and source.kind == "file":
        source = Source(Path(settings.architecture), "folder", shown("model", "architecture"))
    config = source.config("")
    if config is None:
        raise SourceError.said(
            pt=f"{source.title()} não traz config.json",
            en=f"{source.title()} brings no config.json",
            hint_pt="dê a pasta do modelo (config.json, tokenizador e pesos), ou em modelo.arquitetura a pasta que o tem",
            hint_en="give the model's folder (config.json, tokenizer and weights), or in model.architecture one that has it",
            where=source.what,
        )
    return config


def _typed_config(stored: Mapping[str, Any], source: Source) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = str(stored.get("model_type", ""))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in CONFIG_MAPPING:
        raise SourceError.said(
            pt=f"este transformers não conhece modelos de linguagem do tipo {kind!r}",
            en=f"this transformers knows no causal language model of type {kind!r}",
            hint_pt="atualize o transformers; modelos que trazem código próprio não são executados",
            hint_en="update transformers; models that bring code of their own are not run",
            where=source.what,
        )
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(stored))
    except Exception as error:  # each config class has its own ways to refuse
        raise _wrong_config(kind, error, source) from error


def _first_build(config: Any, source: Source) -> Any:
    """Values that a config class lets pass (the name of an activation or of a rotary rule) stop the model's own class."""
    try:
        return _lm_weights.build(config, torch.bfloat16)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise _wrong_config(config.model_type, error, source) from error


def _wrong_config(kind: str, error: Exception, source: Source) -> SourceError:
    return SourceError(
        t(pt=f"config.json não descreve um modelo {kind}: {error}", en=f"config.json describes no {kind}: {error}"),
        t(pt="baixe este arquivo de novo", en="download this file again"),
        source.what,
    )


def _refuse_quantised(stored: Mapping[str, Any], source: Source) -> None:
    told = stored.get("quantization_config")
    if not told:
        return
    method = told.get("quant_method", "?") if isinstance(told, Mapping) else told
    raise SourceError.said(
        pt=f"{source.title()} já está quantizado ({method}), e só leio pesos de 16 ou 32 bits e GGUF",
        en=f"{source.title()} is quantised already ({method}); only 16 and 32-bit weights and GGUF are read",
        hint_pt="use o modelo original: com memoria.quantizacao_base: nf4 ele é quantizado ao ser lido",
        hint_en="use the original model: with memory.base_quantization: nf4 it is quantised as it is read",
        where=source.what,
    )


def _check_trainable(model: Any, source: Source) -> None:
    kind = type(model)
    if any(type(layer).__name__ == "Conv1D" for layer in model.modules()):
        reason = t(pt="guarda os pesos em Conv1D", en="keeps its weights in Conv1D")
    elif not hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
        reason = t(pt="tem uma atenção própria", en="has an attention of its own")
    elif not isinstance(model.get_output_embeddings(), nn.Linear):
        reason = t(pt="não tem uma cabeça linear", en="has no linear head")
    else:
        return
    known = "Llama, Qwen, Mistral, Gemma, Phi, SmolLM, Granite …"
    raise SourceError.said(
        pt=f"{kind.__name__} não é treinável aqui: {reason}",
        en=f"{kind.__name__} cannot be trained here: it {reason}",
        hint_pt=f"use um modelo {known}",
        hint_en=f"use a model such as {known}",
        where=source.what,
    )


def _unused_notice(unused: list[str]) -> list[str]:
    if not unused:
        return []
    listed = ", ".join(unused[:4]) + (", …" if len(unused) > 4 else "")
    return [
        t(
            pt=f"{len(unused)} tensores do arquivo não são deste modelo e ficam de fora: {listed}",
            en=f"{len(unused)} tensors of the file are not of this model and are left out: {listed}",
        )
    ]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(where: Path, source: Source) -> Any:
    """From a folder: the base's, or the one that the user names."""
    from transformers import AutoTokenizer

    own = where == source.path
    try:
        return AutoTokenizer.from_pretrained(str(where), local_files_only=True)
    except Exception as error:  # each tokenizer class has its own ways to refuse
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        if not any((where / name).is_file() for name in TOKENIZER_FILES):
            cause = t(pt="a pasta não tem tokenizer.json", en="the folder has no tokenizer.json")
        raise SourceError.said(
            pt=f"não consegui carregar o tokenizador de {where}: {cause}",
            en=f"cannot load the tokenizer of {where}: {cause}",
            hint_pt="a pasta precisa de tokenizer.json e tokenizer_config.json; ou indique outra em modelo.tokenizador",
            hint_en="the folder needs tokenizer.json and tokenizer_config.json; or name another in model.tokenizer",
            where=source.what if own else shown("model", "tokenizer"),
        ) from error
