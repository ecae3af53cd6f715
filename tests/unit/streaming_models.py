"""A chain of small blocks with frozen weights and trained biases, to stream, checkpoint and offload."""

import torch
from torch import nn

from lora_trainer.seam.family import BlockGroup
from lora_trainer.seam.technique import Technique
from lora_trainer.techniques import MemoryPlan


class Block(nn.Module):
    """Linear with a frozen weight and a trained bias; `packed` stands for quantised bytes and their scale."""

    def __init__(self, width: int, packed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight.requires_grad_(False)
        if packed:
            self.register_buffer("codes", torch.arange(width, dtype=torch.uint8))
            self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x + self.codes * self.scale if hasattr(self, "codes") else x


class Chain(nn.Module):
    def __init__(self, count: int = 5, width: int = 16, packed: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, packed) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    @property
    def groups(self) -> list[BlockGroup]:
        return [BlockGroup("chain", list(self.blocks))]


def apply(model: Chain, *techniques: Technique) -> Chain:
    MemoryPlan(techniques).wrap(model, model.groups)
    return model


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    model.zero_grad()
    return found
