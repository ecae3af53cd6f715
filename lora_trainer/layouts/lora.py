"""A LoRA as plain tensors, apart from any model and any file format; every format converts to and from it.

Each module's effect is `scale · up @ down` added to its weight (Hu et al. 2021, §4.1); with a magnitude it is DoRA
(Liu et al. 2024, eq. 5). Keys are the module paths of our models, `unet.mid_block.…`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraModule:
    """down (r, in) or (r, in, kh, kw); up (out, r) or (out, r, 1, 1); magnitude (out,): DoRA's norm of output rows."""

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def alpha(self) -> float:
        """What readers divide by the rank to get the scale, whatever rule (rsLoRA or not) made it."""
        return self.scale * self.rank

    @property
    def factors(self) -> dict[str, Tensor]:
        named = {"down": self.down, "up": self.up, "magnitude": self.magnitude}
        return {name: factor for name, factor in named.items() if factor is not None}

    @property
    def matrices(self) -> list[Tensor]:
        """What `balanced` moves sizes between."""
        return [self.down, self.up]

    def delta(self) -> Tensor:
        """Change of the weight without DoRA's rescaling: (out, in) or (out, in · kh · kw)."""
        return self.scale * (self.up.float().flatten(1) @ self.down.float().flatten(1))

    def change(self, weight: Tensor) -> Tensor:
        """Of this very weight, DoRA's rescaling included: (out, in) or (out, in · kh · kw), float32 on the CPU."""
        if self.magnitude is None:
            return self.delta()
        before = weight.detach().to("cpu", torch.float32).flatten(1)
        after = before + self.delta()
        return after * (self.magnitude.float() / torch.linalg.vector_norm(after, dim=1))[:, None] - before

    def with_scale(self, scale: float) -> "LoraModule":
        """The same effect under another scale; the difference goes into `up`."""
        return replace(self, up=self.up * (self.scale / scale), scale=scale)

    def balanced(self) -> "LoraModule":
        """The same effect with `down` and `up` of about equal size; a power of two moves across: nothing is rounded."""
        down, up = (float(t.abs().max()) for t in (self.down, self.up))
        if not down or not up:
            return self
        shift = 2.0 ** round((torch.tensor(down).log2() - torch.tensor(up).log2()).item() / 2)
        return replace(self, down=self.down / shift, up=self.up * shift)

    def balanced_by_component(self) -> "LoraModule":
        """The same for each row of `down` and its column of `up` apart."""
        down, up = self.down.abs().flatten(1).amax(1), self.up.abs().flatten(1).amax(0)  # (r,): kernels of `up` are 1 x 1
        used = (down > 0) & (up > 0)
        shift = torch.where(used, 2.0 ** ((down.log2() - up.log2()) / 2).round(), torch.ones(()))
        columns = shift.view(1, -1, *[1] * (self.up.ndim - 2))
        return replace(self, down=self.down / shift.view(-1, *[1] * (self.down.ndim - 1)), up=self.up * columns)


Lora = dict[str, LoraModule]
"""Module path -> its LoRA."""


def portable_path(path: str) -> str:
    """Files say `text_model.` in text encoders; transformers 5 leaves it out of CLIPTextModel's module paths."""
    part, _, rest = path.partition(".")
    return f"{part}.text_model.{rest}" if part.startswith("text_encoder") and rest.startswith("encoder.") else path
