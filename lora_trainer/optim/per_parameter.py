"""One optimizer a parameter, behind one object that looks like the usual optimizer: same groups, same state.

So states are saved and resumed either way, and each parameter can be stepped at a moment of its own. An optimizer with one
estimate, or one average of the run, for all parameters cannot be taken apart so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..seam.technique import Groups


class PerParameter(torch.optim.Optimizer):
    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]) -> None:
        super().__init__([dict(group) for group in groups], {})
        self._inner: dict[nn.Parameter, tuple[torch.optim.Optimizer, int]] = {}
        for place, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                self._inner[parameter] = (build([{**group, "params": [parameter]}]), place)
                self._mirror(parameter)

    @torch.no_grad()
    def _step_one(self, parameter: nn.Parameter) -> None:
        inner, place = self._inner[parameter]
        inner.param_groups[0]["lr"] = self.param_groups[place]["lr"]
        inner.step()
        self._mirror(parameter)

    def _mirror(self, parameter: nn.Parameter) -> None:
        """Show the state of one of them as part of the whole; some count their steps in the group."""
        inner, place = self._inner[parameter]
        if parameter in inner.state:
            self.state[parameter] = inner.state[parameter]
        kept = ("params", "lr", "base_lr")
        self.param_groups[place].update((k, v) for k, v in inner.param_groups[0].items() if k not in kept)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self._inner:
            if parameter.grad is not None:
                self._step_one(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Through each one's own loading, which knows its dtypes."""
        for place, saved in enumerate(state_dict["param_groups"]):
            self.param_groups[place].update((key, value) for key, value in saved.items() if key != "params")
            for number, parameter in zip(saved["params"], self.param_groups[place]["params"], strict=True):
                own = {number: state_dict["state"][number]} if number in state_dict["state"] else {}
                one = {"state": own, "param_groups": [{**saved, "params": [number]}]}
                self._inner[parameter][0].load_state_dict(one)
                self._mirror(parameter)
