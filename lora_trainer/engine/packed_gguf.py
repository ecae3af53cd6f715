"""A base kept as its GGUF file stores it: the blocks' bytes are the weights, unpacked for each use, forward and backward.

Unlike the other packings this one packs nothing: bytes come from the file (`set_packed`), so the base takes what the file
takes and training sees exactly the weights that llama.cpp runs. Embeddings stay packed too and unpack only the rows that
are looked up. Tensors that hold plain numbers become ordinary parameters unless they are narrower than the wanted dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..files.gguf_blocks import LAYOUTS, PLAIN, dequantize, row_bytes
from .packed import Packing, _Packed


@dataclass(frozen=True)
class GgufBlocks(Packing):
    """One kind of ggml's blocks."""

    from_file: ClassVar[bool] = True
    kind: str

    @property
    def title(self) -> str:
        return self.kind.lower()

    def fits(self, layer: nn.Module) -> bool:
        width = layer.in_features if isinstance(layer, nn.Linear) else 0
        width = layer.embedding_dim if isinstance(layer, nn.Embedding) else width
        return width > 0 and (self.kind in PLAIN or width % LAYOUTS[self.kind].weights == 0)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Shapes alone: a real weight comes packed from its file."""
        assert weight.is_meta or isinstance(weight, FakeTensor), "GGUF blocks are read, not made"
        size = (len(weight), row_bytes(self.kind, weight.shape[1]))
        return {"blocks": torch.empty(size, dtype=torch.uint8, device=weight.device)}

    def unpack(self, packed: Sequence[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return dequantize(packed[0], self.kind, dtype).view(shape)


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]
    """Unpacks the rows that are looked up."""

    plain = nn.Embedding

    @classmethod
    def of(cls, layer: nn.Module, packing: Packing) -> "PackedEmbedding":
        self = cast(PackedEmbedding, super().of(layer, packing))
        self._buffers.pop("embed_scale", None)
        self._non_persistent_buffers_set.discard("embed_scale")
        return self

    def forward(self, input: Tensor) -> Tensor:
        (blocks,) = self.packed()
        rows = nn.functional.embedding(input.flatten(), blocks)
        shape = torch.Size([len(rows), self.weight_shape[1]])
        found = self.packing.unpack([rows], shape, self.weight_dtype).view(*input.shape, -1)
        scale = vars(self).get("scalar_embed_scale")  # Gemma's, rounded to the weights' dtype
        return found if scale is None else found * torch.full((), scale, dtype=found.dtype, device=found.device)


def unpacks_rows(layer: nn.Module | None) -> bool:
    """Whether PackedEmbedding does what this layer does."""
    scaled = layer is not None and "embed_scale" in layer._buffers
    return isinstance(layer, nn.Embedding) and layer.max_norm is None and scaled == hasattr(layer, "scalar_embed_scale")
