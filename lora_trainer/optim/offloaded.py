"""An optimizer whose moments wait in host memory (techniques/optimizer_offload.py); each parameter's come to the card for
its own update, and go back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.host import host_buffer, is_fake
from ..engine.tracker import count_transfer, host_memory
from ..seam.technique import Groups
from .per_parameter import PerParameter

SMALLEST = 1024
"""Bytes; counters and tables are not worth a copy."""


class Offloaded(PerParameter):
    """Between steps, `state` holds the host's tensors."""

    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]) -> None:
        self._hosts: dict[nn.Parameter, dict[str, Tensor]] = {}
        super().__init__(groups, build)

    def in_host(self) -> set[int]:
        """Ids of those tensors of the state that lie in host memory."""
        return {id(host) for kept in self._hosts.values() for host in kept.values()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        devices = {parameter.device for parameter in self._inner if parameter.device.type == "cuda" and not is_fake(parameter)}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()  # whoever reads the state next reads host memory

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        state = self._inner[parameter][0].state[parameter]
        for name, host in self._hosts.get(parameter, {}).items():
            state[name] = torch.empty_like(host, device=parameter.device).copy_(host, non_blocking=True)
            count_transfer(host.nbytes)
        super()._step_one(parameter)
        self._away(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._hosts.clear()
        for parameter in self._inner:
            self._away(parameter)

    @torch.no_grad()
    def _away(self, parameter: nn.Parameter) -> None:
        """Copy what is worth it to the host, into last step's tensors if there are any."""
        state, hosts = self._inner[parameter][0].state[parameter], self._hosts.setdefault(parameter, {})
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.nbytes < SMALLEST:
                continue
            if name not in hosts or hosts[name].shape != value.shape:
                hosts[name] = _host_like(value)
            hosts[name].copy_(value, non_blocking=True)
            count_transfer(value.nbytes)
            state[name] = hosts[name]


def _host_like(value: Tensor) -> Tensor:
    buffer = host_buffer(value.nbytes, value, locked=value.device.type == "cuda" and not is_fake(value))
    with host_memory():
        return buffer.view(value.dtype).view(value.shape)
