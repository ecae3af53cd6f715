"""A GGUF file seen as those of safetensors are: values of any kind of its tensors, and which holds which parameter."""

import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from ..errors import SourceError, t
from ..files.gguf_blocks import SUPPORTED, dequantize
from ..files.gguf_names import EXPERT, WITHOUT_PARAMETER, architecture, paired_heads, tensor_name
from ..files.gguf_reader import GgufFile
from .weights import WHOLE, Piece, Share, Weights, bare


class GgufWeights(Weights):
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.header = file.tensors
        self._files = {name: info.path for name, info in file.tensors.items()}

    def readable(self, key: str) -> bool:
        return True  # kinds that cannot stay packed are unpacked as they are read

    def unpacked_kinds(self) -> list[str]:
        return sorted({info.dtype for info in self.header.values()} - SUPPORTED)

    def companions(self, key: str) -> list[str]:
        return []

    def quantised_shape(self, key: str) -> tuple[int, ...] | None:
        return None

    def value(self, key: str) -> Tensor:
        """float32, from any kind that the `gguf` package can unpack."""
        return self._values(key, self.file.raw(key)).reshape(self.header[key].shape)

    def part(self, piece: Piece) -> Tensor:
        """Of a matrix, no more rows are read than are wanted."""
        shape = self.header[piece.key].shape
        if piece.share == WHOLE or len(shape) == 1:
            return super().part(piece)
        return piece.finished(self._values(piece.key, self._rows(piece)).view(-1, shape[-1]))

    def blocks(self, piece: Piece) -> Tensor:
        """(rows, bytes of a row) uint8, in our order of rows."""
        return piece.ordered(self._rows(piece))

    def _rows(self, piece: Piece) -> Tensor:
        return self.file.raw(piece.key, piece.span(prod(self.header[piece.key].shape[:-1])))

    def _values(self, key: str, raw: Tensor) -> Tensor:
        kind = self.header[key].dtype
        return dequantize(raw, kind, torch.float32) if kind in SUPPORTED else _unpacked_slowly(raw, kind, key)

    def unpacked_notice(self) -> str:
        """A file with kinds that cannot stay packed is trained on all the same, at the price of 16 bits a weight."""
        name, listed = self.file.path.name, ", ".join(self.unpacked_kinds())
        full = sum(prod(info.shape) for info in self.header.values()) * 2 / 2**30
        now = self.file.data_bytes / 2**30
        return t(
            pt=f"{name} tem tensores {listed}, que não treinam empacotados: o modelo é desempacotado em 16 bits "
            f"(~{full:.1f} GiB em vez de {now:.1f}); um Q4_K_M, Q5_K_M, Q6_K ou Q8_0 ficaria empacotado",
            en=f"{name} has {listed} tensors, which are not trained packed: the model is unpacked to 16 bits "
            f"(~{full:.1f} GiB instead of {now:.1f}); a Q4_K_M, Q5_K_M, Q6_K or Q8_0 would stay packed",
        )


def _unpacked_slowly(raw: Tensor, kind: str, tensor: str) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as unpack

    try:
        return torch.from_numpy(unpack(raw.numpy(), GGMLQuantizationType[kind]))
    except (KeyError, NotImplementedError) as error:
        raise SourceError.said(
            pt=f"não sei desempacotar {tensor}, do tipo {kind}",
            en=f"{tensor}, of the kind {kind}, cannot be unpacked",
            hint_pt="atualize o pacote gguf, ou use um GGUF Q4_K_M, Q6_K ou Q8_0 do mesmo modelo",
            hint_en="update the gguf package, or use a Q4_K_M, Q6_K or Q8_0 GGUF of the same model",
            where="modelo_base",
        ) from error


# -- a language model's parameters


def parameter_pieces(file: GgufFile, parameters: Mapping[str, tuple[int, ...]], what: str = "modelo_base") -> dict[str, Piece]:
    """Where each parameter lies, for names and shapes as in a transformers model's `state_dict`.

    SourceError naming a few where parameters are missing, have another shape, or tensors belong to none.
    """
    known = architecture(file, what)
    found: dict[str, Piece] = {}
    missing, misshapen = [], []
    for name, tensor in tensor_names(file, parameters).items():
        info, shape = file.tensors.get(tensor), tuple(parameters[name])
        if info is None:
            missing.append(tensor)
            continue
        stored, share = _share(name, info.shape)
        if bare(stored) != bare(shape) or sum(share) > 1:
            misshapen.append(f"{tensor} {list(info.shape)} ≠ {list(shape)}")
        shift = known.norm_shift if tensor.endswith("norm.weight") else 0.0
        found[name] = Piece(tensor, share=share, pairs=paired_heads(file.architecture, tensor, _heads(file)), shift=shift)
    used = {piece.key for piece in found.values()}
    unused = [name for name in file.tensors if name not in used and name not in WITHOUT_PARAMETER]
    _refuse(file, missing, misshapen, unused, what)
    return found


def tensor_names(file: GgufFile, parameters: Collection[str]) -> dict[str, str]:
    """Parameter name -> tensor name; a head without a tensor of its own is the embedding."""
    names = {name: tensor_name(name, file.architecture) or name for name in parameters}
    if "output.weight" not in file.tensors:
        names |= {name: "token_embd.weight" for name in parameters if name == "lm_head.weight"}
    return names


def _share(name: str, stored: tuple[int, ...]) -> tuple[tuple[int, ...], Share]:
    """Shape and share of what is a parameter's; llama.cpp stacks the matrices of a layer's experts."""
    expert = re.fullmatch(EXPERT, name)
    return (stored[1:], (Fraction(int(expert[2]), stored[0]), Fraction(1, stored[0]))) if expert else (stored, WHOLE)


def _heads(file: GgufFile) -> tuple[int, int]:
    """Of queries, of keys."""
    prefix = f"{file.architecture}.attention"
    heads = file.metadata.get(f"{prefix}.head_count", 1)
    return heads, file.metadata.get(f"{prefix}.head_count_kv", heads)


def _refuse(file: GgufFile, missing: list[str], misshapen: list[str], unused: list[str], what: str) -> None:
    def few(names: list[str]) -> str:
        return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")

    problems = [
        (missing, t(pt="faltam tensores", en="tensors are missing")),
        (misshapen, t(pt="tensores de outro formato", en="tensors of another shape")),
        (unused, t(pt="tensores que o modelo não tem", en="tensors the model does not have")),
    ]
    if any(names for names, _ in problems):
        listed = "; ".join(f"{title}: {few(names)}" for names, title in problems if names)
        raise SourceError(
            f"{file.path.name}: {listed}",
            t(
                pt="o arquivo está incompleto ou é de uma variante que não conheço: baixe-o de novo, ou use a pasta do "
                "modelo em safetensors",
                en="the file is incomplete or of a variant not known here: download it again, or use the model's "
                "safetensors folder",
            ),
            what,
        )
